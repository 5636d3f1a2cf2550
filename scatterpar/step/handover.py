"""Gradients into ``.grad``: without a copy where there is none yet, and where nobody looks on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.chunks import in_chunks, in_memory_order, is_in_memory_order
from scatterpar.torch_private import backward, has_gradient_hooks, held_nodes

__all__ = ["Pair", "Sums", "hand_over", "unobserved"]

Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it


def hand_over(pairs: list[Pair]) -> None:
    """Let autograd accumulate the gradients; ``pairs`` is empty afterwards.

    A leaf without a gradient takes the very memory of a tensor that nobody else refers to, which
    the roots of a backward pass never are: their caller has them. So they are what a node gives
    back.
    """
    if not pairs:
        return
    leaves = [leaf for leaf, _ in pairs]
    with torch.inference_mode(False), torch.enable_grad():
        pairs[:] = [(leaf, _of_its_own(gradient)) for leaf, gradient in pairs]
        root = _Hand.apply(pairs, *leaves)  # type: ignore[no-untyped-call]
        backward([root], [torch.zeros_like(root)])


class _Hand(torch.autograd.Function):
    """A node that has the gradients of its inputs ready."""

    @staticmethod
    def forward(ctx: Any, pairs: list[Pair], *leaves: Tensor) -> Tensor:
        ctx.pairs = pairs
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd's thread cannot free, in a free-threaded interpreter, what the caller's has made,
        # and counts who refers to a tensor: so it gets another one with the same memory.
        gradients = [g.detach() if g.layout == torch.strided else g for _, g in ctx.pairs]
        ctx.pairs.clear()
        return (None, *gradients)


def _of_its_own(gradient: Tensor) -> Tensor:
    """``gradient``, or a copy of one that is a part of something larger."""
    if gradient.layout != torch.strided:
        return gradient
    return gradient if gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()


def unobserved(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Those whose leaf has a gradient that can be added to in silence, and the others.

    They are of one device, since they are added in few messages. A hook may look at any gradient,
    and may raise: where there is one, nothing is silent.
    """
    if any(leaf._backward_hooks or has_gradient_hooks(leaf) for leaf, _ in pairs):
        return [], pairs
    quiet = [(t, g) for t, g in pairs if t.device == pairs[0][0].device and _is_plain_sum(t, g)]
    held = held_nodes([leaf for leaf, _ in quiet])
    quiet = [pair for pair, is_held in zip(quiet, held, strict=True) if not is_held]
    silent = {id(leaf) for leaf, _ in quiet}
    return quiet, [pair for pair in pairs if id(pair[0]) not in silent]


def _is_plain_sum(leaf: Tensor, gradient: Tensor) -> bool:
    there = leaf.grad
    return (
        there is not None
        and type(leaf) in (Tensor, nn.Parameter)
        and there.layout == gradient.layout == torch.strided
        and (there.dtype, there.shape, there.stride())
        == (gradient.dtype, gradient.shape, gradient.stride())
        and is_in_memory_order(there)
        and is_in_memory_order(gradient)
        and not there.requires_grad
    )


class Sums:
    """Gradients that are added to what leaves have, and can be taken out again.

    What was there before moves into the memory of what was added, chunk by chunk.

    Args:
        pairs: leaves with a gradient, and what is added to it.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._sums = [_flat(leaf.grad) for leaf, _ in pairs]
        self._added = [_flat(gradient) for _, gradient in pairs]
        self._before: list[Pair] = []

    def add(self) -> None:
        """Add all of them."""
        with torch.no_grad():
            for message in in_chunks(dict(enumerate(self._sums))):
                sums, added = message.of(self._sums), message.of(self._added)
                before = torch.cat(sums).split(message.sizes)
                self._before += zip(sums, before, strict=True)
                torch._foreach_add_(sums, added)
                torch._foreach_copy_(added, before)
                self._before[-len(sums) :] = zip(sums, added, strict=True)
                del before

    def undo(self) -> None:
        """Put back what was there."""
        for part, before in self._before:
            part.copy_(before)


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    flat = in_memory_order(tensor)
    assert flat is not None
    return flat
