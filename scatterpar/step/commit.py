"""What a step computed, written to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.buffers import Writing, running
from scatterpar.step.outcome import Outcome
from scatterpar.threads.workers import Attempt
from scatterpar.torch_private import backward, has_gradient_hooks, is_observed

_Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it


def commit(outcome: Outcome) -> None:
    """Write gradients, buffers and random state, or leave all of them as they are.

    What takes memory is made first. A parameter without a gradient takes the one that came, if it
    fits and nothing hangs on any parameter; else autograd itself hands gradients over. So hooks
    run as under a plain ``backward()``, once and on the whole gradient; if one fails, the
    attempt puts all back. The rest takes no memory, and runs no code of the user's.
    """
    pairs = [(leaf, g) for leaf, g in outcome.gradients if g is not None]
    outcome.gradients.clear()
    moments = [value for layer in outcome.layers for value in running(layer)]
    unplanned = moments if outcome.writings else [*outcome.buffers, *moments]
    writings = [*outcome.writings, Writing(unplanned)]
    observed = any(is_observed(leaf) for leaf, _ in pairs)
    _remember(pairs, observed, outcome.attempt)
    taken = [not observed and _is_taken(leaf, gradient) for leaf, gradient in pairs]
    others = [pair for pair, is_taken in zip(pairs, taken, strict=True) if not is_taken]
    outcome.attempt.generators.commit()  # before hooks, which may draw
    for leaf, gradient in compress(pairs, taken):
        leaf.grad = gradient
    pairs.clear()
    _hand_over(others)
    for write in writings:
        write()


def _remember(pairs: Sequence[_Pair], observed: bool, attempt: Attempt) -> None:
    """What is put back where adding gradients fails, as hooks may, or what takes memory in it."""
    leaves = [leaf for leaf, _ in pairs]
    old = [(leaf.grad, g) for leaf, g in pairs if leaf.grad is not None]
    may_fail = observed or any(
        was.layout != torch.strided or was.dtype != g.dtype for was, g in old
    )
    written = [was for was, _ in old if may_fail]
    written += [leaf for leaf in leaves if observed and has_gradient_hooks(leaf)]
    attempt.keep(written, leaves)


def _is_taken(leaf: Tensor, gradient: Tensor) -> bool:
    """Whether autograd would make this very gradient the one of a leaf on which nothing hangs."""
    return (
        leaf.grad is None
        and type(leaf) in (nn.Parameter, Tensor)
        and type(gradient) is Tensor
        and gradient.layout == torch.strided
        and gradient.dtype == leaf.grad_dtype
        and gradient.stride() == leaf.stride()
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def _hand_over(pairs: list[_Pair]) -> None:
    """Let autograd accumulate the gradients; ``pairs`` is empty afterwards.

    A leaf without a gradient takes the very memory of a tensor that nobody else refers to, which
    the roots of a backward pass never are: their caller has them. So they are what a node gives
    back.
    """
    if not pairs:
        return
    leaves = [leaf for leaf, _ in pairs]
    with torch.inference_mode(False), torch.enable_grad():
        pairs[:] = [(leaf, g if _is_of_its_own(g) else g.clone()) for leaf, g in pairs]
        root = _Hand.apply(pairs, *leaves)  # type: ignore[no-untyped-call]
        backward([root], [root.detach()])


class _Hand(torch.autograd.Function):
    """A node that has the gradients of its inputs ready."""

    @staticmethod
    def forward(ctx: Any, pairs: list[_Pair], *leaves: Tensor) -> Tensor:
        ctx.pairs = pairs
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd's thread cannot free, in a free-threaded interpreter, what the caller's has made,
        # and counts who refers to a tensor: so it gets another one with the same memory.
        gradients = [g.detach() if g.layout == torch.strided else g for _, g in ctx.pairs]
        ctx.pairs.clear()
        return (None, *gradients)


def _is_of_its_own(gradient: Tensor) -> bool:
    """Whether it is no part of something larger; sparse ones are taken for none."""
    is_sparse = gradient.layout != torch.strided
    return is_sparse or gradient.untyped_storage().nbytes() == gradient.nbytes
