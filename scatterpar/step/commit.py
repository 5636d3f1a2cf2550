"""What a step computed, written to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.chunks import add_each, copy_each, in_memory_order, is_in_memory_order
from scatterpar.devices.fingerprints import changed
from scatterpar.replicas.buffers import BufferValue, Registry, running
from scatterpar.replicas.kinds import is_sparse, pieces_of
from scatterpar.step.outcome import Outcome
from scatterpar.threads.workers import note
from scatterpar.torch_private import backward, has_gradient_hooks, held_nodes

__all__ = [
    "Pair",
    "add_to",
    "commit",
    "commit_buffers",
    "hand_over",
    "unobserved",
]

Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it


def commit(outcome: Outcome) -> None:
    """Write gradients, buffers and random state, or leave all of them as they are.

    Autograd itself hands the gradients to the parameters: so hooks on parameters run as under a
    plain ``backward()``, once and on the whole gradient. A parameter without a gradient takes the
    memory of the one that it is handed. In this order:

    1. What takes memory is made. Nothing of the user's is written.
    2. Gradients that somebody may look at, such as a hook, are handed over. If that fails, as a
       hook may, they are put back.
    3. All else is written, where it is. That neither takes memory nor runs the user's code, and
       interrupts wait.

    Args:
        outcome: what the step computed. Its gradients are the parameters' afterwards.
    """
    with outcome.attempt:  # random numbers as before, also where memory ends before the try
        gradients = [(root, g) for root, g in outcome.gradients if g is not None]
        outcome.gradients.clear()
        quiet, observed = unobserved(gradients)
        del gradients
        buffers = outcome.buffers + [value for layer in outcome.layers for value in running(layer)]
        buffers = _of_their_own(buffers)
        undo = _remember([root for root, _ in observed])
        try:
            hand_over(observed)
        except BaseException as error:
            _put_back(undo, error)
            raise
        add_to(quiet)
        _write(buffers)
        outcome.attempt.streams.commit()


def _put_back(undo: Iterable[Callable[[], object]], error: BaseException) -> None:
    """Everything as it was; where one thing cannot be put back, the others are all the same."""
    with torch.no_grad():
        for put_back in undo:
            try:
                put_back()
            except Exception as another:
                note(error, f"after that, something could not be put back: {another!r}")


def commit_buffers(buffers: Iterable[BufferValue]) -> None:
    """Give modules their new buffers: in place where shape and dtype fit, else rebound.

    Those that a forward pass registered, or deleted, are so in the module afterwards.
    """
    _write(_of_their_own(buffers))


def _of_their_own(buffers: Iterable[BufferValue]) -> list[BufferValue]:
    """The same; those that are never written have memory of their own, if they have changed."""
    own = []
    for holder, name, value in buffers:
        target = holder.get(name)
        if value is not None and target is not None and _is_never_written(value, target):
            is_kept = type(holder) is not Registry and _same(target, value)
            value = target if is_kept else value.detach().clone()
        own.append((holder, name, value))
    return own


def _write(buffers: Iterable[BufferValue]) -> None:
    into: list[Tensor] = []
    values: list[Tensor] = []
    for holder, name, value in buffers:
        if type(holder) is Registry:
            holder.register(name)
        target = holder.get(name)
        if value is target:
            continue
        if (
            value is not None
            and target is not None
            and _fits(target, value)
            and not _is_never_written(value, target)
        ):
            into.append(target)
            values.append(value)
        else:
            holder[name] = None if value is None else value.detach()
    if into:
        with torch.no_grad():
            copy_each(into, values)


def _is_never_written(value: Tensor, target: Tensor) -> bool:
    """Whether a buffer is sparse, or torch refuses to write its elements."""
    if is_sparse(value) and is_sparse(target):
        return True
    return _is_read_only(target) and _fits(target, value)


def _is_read_only(tensor: Tensor) -> bool:
    """Whether ``tensor`` is expanded, or was made in inference mode."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return True
    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return False
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _fits(target: Tensor, value: Tensor) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


def _same(target: Tensor, value: Tensor) -> bool:
    """Whether two tensors hold the same bits; sparse ones, in the same pieces."""
    if not is_sparse(target):
        return not any(changed([target], [value]))
    pairs = list(zip(pieces_of(target), pieces_of(value), strict=False))
    if target.layout != value.layout or any(not _fits(one, other) for one, other in pairs):
        return False
    return not any(changed(*zip(*pairs, strict=True)))


def _remember(roots: Sequence[Tensor]) -> list[Callable[[], None]]:
    """How to put back each ``.grad``, and each parameter that a hook of its own may update."""
    return [
        partial(
            _put_back_one,
            root,
            root.grad,
            None if root.grad is None else root.grad.clone(),
            root.detach().clone() if has_gradient_hooks(root) else None,
        )
        for root in roots
    ]


def _put_back_one(
    root: Tensor, gradient: Tensor | None, kept: Tensor | None, value: Tensor | None
) -> None:
    root.grad = gradient
    if gradient is not None and kept is not None:
        gradient.copy_(kept)
    if value is not None:
        root.copy_(value)


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


def add_to(pairs: Sequence[Pair]) -> None:
    """Add to the gradients that leaves have."""
    if pairs:
        with torch.no_grad():
            add_each([_flat(leaf.grad) for leaf, _ in pairs], [_flat(g) for _, g in pairs])


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    flat = in_memory_order(tensor)
    assert flat is not None
    return flat
