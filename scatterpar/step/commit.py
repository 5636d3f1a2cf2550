"""What a step computed, written to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.chunks import (
    Pairs,
    add_each,
    copy_lists,
    grouped,
    in_memory_order,
    is_in_memory_order,
)
from scatterpar.devices.fingerprints import changed
from scatterpar.replicas.buffers import BufferValue, Registry, running
from scatterpar.replicas.kinds import is_sparse, pieces_of
from scatterpar.step.outcome import Outcome
from scatterpar.threads.workers import note
from scatterpar.torch_private import backward, has_gradient_hooks, held_nodes

__all__ = ["commit", "commit_buffers"]

_Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it

_HOOKS = attrgetter("_backward_hooks")


def commit(outcome: Outcome) -> None:
    """Write gradients, buffers and random state, or leave all of them as they are.

    Where anything hangs on parameters, autograd itself hands them their gradients: so hooks run as
    under a plain ``backward()``, once and on the whole gradient. A parameter without a gradient
    takes the memory of the one that it is given. In this order:

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
        quiet, observed = _unobserved(gradients)
        del gradients
        moments = [value for layer in outcome.layers for value in running(layer)]
        write_buffers = _planned([*outcome.buffers, *moments])
        undo = _remember([root for root, _ in observed])
        try:
            _hand_over(observed)
        except BaseException as error:
            _put_back(undo, error)
            raise
        _give(quiet)
        write_buffers()
        outcome.attempt.generators.commit()


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
    _planned(buffers)()


def _planned(buffers: Iterable[BufferValue]) -> Callable[[], None]:
    """How to write buffers, in place or anew; what that takes memory for is made here.

    Sparse ones, and those that torch refuses to write, are bound anew if they have changed.
    """
    into: dict[int, _Pair] = {}
    anew: list[BufferValue] = []
    for place, name, value in buffers:
        target = place.get(name)
        if value is None or target is None or not _fits(target, value):
            anew.append((place, name, value if value is None else value.detach()))
            continue
        if into.get(id(target), (target, value))[1] is not value:  # one tensor became two
            target = value.detach()
            anew.append((place, name, target))
        elif _can_be_written(target):
            into[id(target)] = target, value
        elif not _same(target, value):
            target = value.detach().clone()
            anew.append((place, name, target))
        if isinstance(place, Registry):
            anew.append((place, name, target))
    targets, values = [target for target, _ in into.values()], [v for _, v in into.values()]
    return partial(_write, grouped(targets, values), anew)


def _write(pairs: Sequence[Pairs], anew: Sequence[BufferValue]) -> None:
    with torch.no_grad():
        copy_lists(pairs)
    for place, name, value in anew:
        place[name] = value


def _can_be_written(tensor: Tensor) -> bool:
    """Whether it is dense, not expanded, and was not made in inference mode."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return False
    strides = tensor.stride()
    return 0 not in strides or all(
        stride or size < 2 for size, stride in zip(tensor.shape, strides, strict=True)
    )


def _fits(target: Tensor, value: Tensor) -> bool:
    return (target.shape, target.dtype, target.layout) == (value.shape, value.dtype, value.layout)


def _same(target: Tensor, value: Tensor) -> bool:
    """Whether two tensors hold the same bits; sparse ones, in the same pieces."""
    if not is_sparse(target):
        return not any(changed([target], [value]))
    pairs = list(zip(pieces_of(target), pieces_of(value), strict=False))
    fit = all(_fits(one, other) for one, other in pairs)
    return fit and not any(changed(*zip(*pairs, strict=True)))


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
        pairs[:] = [(leaf, _of_its_own(gradient)) for leaf, gradient in pairs]
        root = _Hand.apply(pairs, *leaves)  # type: ignore[no-untyped-call]
        backward([root], [torch.zeros_like(root)])


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


def _of_its_own(gradient: Tensor) -> Tensor:
    """``gradient``, or a copy of one that is a part of something larger."""
    if gradient.layout != torch.strided:
        return gradient
    return gradient if gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()


def _unobserved(pairs: list[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
    """Those whose leaf can be given its gradient in silence, as autograd would, and the others.

    They are of one device, since they are added in few messages. A hook may look at any gradient,
    and may raise: where there is one, nothing is silent.
    """
    leaves = [leaf for leaf, _ in pairs]
    if any(map(_HOOKS, leaves)) or any(map(has_gradient_hooks, leaves)):
        return [], pairs
    quiet = [(t, g) for t, g in pairs if t.device == leaves[0].device and _is_plain(t, g)]
    held = held_nodes([leaf for leaf, _ in quiet])
    quiet = [pair for pair, is_held in zip(quiet, held, strict=True) if not is_held]
    silent = {id(leaf) for leaf, _ in quiet}
    fresh = {id(leaf) for leaf, _ in quiet if leaf.grad is None}
    quiet = [(leaf, _of_its_own(g) if id(leaf) in fresh else g) for leaf, g in quiet]
    return quiet, [pair for pair in pairs if id(pair[0]) not in silent]


def _is_plain(leaf: Tensor, gradient: Tensor) -> bool:
    """Whether autograd would keep the gradient as it is, or add it where one is."""
    there = leaf.grad
    if type(leaf) not in (Tensor, nn.Parameter) or gradient.layout != torch.strided:
        return False
    if there is None:
        return leaf.grad_dtype == gradient.dtype and leaf.stride() == gradient.stride()
    if there.requires_grad or not is_in_memory_order(there) or not is_in_memory_order(gradient):
        return False
    return there.dtype == gradient.dtype and there.stride() == gradient.stride()


def _give(pairs: Sequence[_Pair]) -> None:
    """Set the gradients of leaves that have none, add to those of the others."""
    sums = [(leaf.grad, gradient) for leaf, gradient in pairs if leaf.grad is not None]
    for leaf, gradient in pairs:
        if leaf.grad is None:
            leaf.grad = gradient
    with torch.no_grad():
        add_each([_flat(there) for there, _ in sums], [_flat(added) for _, added in sums])


def _flat(tensor: Tensor) -> Tensor:
    flat = in_memory_order(tensor)
    assert flat is not None
    return flat
