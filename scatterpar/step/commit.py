"""What a step computed, written to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.buffers import BufferValue, Writing, running
from scatterpar.step.outcome import Outcome
from scatterpar.threads.workers import note
from scatterpar.torch_private import backward, has_gradient_hooks, is_observed

_Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it
_Before = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # it, .grad, their values


def commit(outcome: Outcome) -> None:
    """Write gradients, buffers and random state, or leave all of them as they are.

    What takes memory is made first. A parameter without a gradient takes the one that came, if it
    fits and nothing hangs on any parameter; else autograd itself hands gradients over. So hooks
    run as under a plain ``backward()``, once and on the whole gradient; if one fails, all is put
    back. The rest takes no memory, and runs no code of the user's.
    """
    pairs = [(leaf, g) for leaf, g in outcome.gradients if g is not None]
    outcome.gradients.clear()
    moments = [value for layer in outcome.layers for value in running(layer)]
    unplanned = moments if outcome.writings else [*outcome.buffers, *moments]
    writings = [*outcome.writings, Writing(unplanned)]
    observed = any(is_observed(leaf) for leaf, _ in pairs)
    are_taken = [not observed and _is_taken(leaf, gradient) for leaf, gradient in pairs]
    taken, others = ([*compress(pairs, one)] for one in (are_taken, map(not_, are_taken)))
    pairs.clear()
    undo = _remember(others, observed)
    generators = outcome.attempt.generators
    try:
        generators.commit()  # before hooks, which may draw
        for leaf, gradient in taken:
            leaf.grad = gradient
        _hand_over(others)
    except BaseException as error:
        _put_back([*undo, *[(leaf, None, None, None) for leaf, _ in taken]], error)
        generators.rollback()
        raise
    for write in writings:
        write()


def commit_buffers(buffers: Iterable[BufferValue]) -> None:
    """Give modules their new buffers: in place where shape and dtype fit, else rebound.

    Those that a forward pass registered, or deleted, are so in the module afterwards.
    """
    Writing(buffers)()


def _remember(pairs: Sequence[_Pair], observed: bool) -> list[_Before]:
    """What is put back where adding gradients fails, as hooks may, or what takes memory in it."""
    before = [(leaf, leaf.grad) for leaf, _ in pairs]
    may_fail = observed or any(
        old is not None and (old.layout != torch.strided or old.dtype != g.dtype)
        for (_, old), (_, g) in zip(before, pairs, strict=True)
    )
    return [
        (
            leaf,
            old,
            old.clone() if may_fail and old is not None else None,
            leaf.detach().clone() if observed and has_gradient_hooks(leaf) else None,
        )
        for leaf, old in before
    ]


def _put_back(undo: Iterable[_Before], error: BaseException) -> None:
    """Everything as it was; where one thing cannot be put back, the others are all the same."""
    with torch.no_grad():
        for leaf, gradient, kept, value in undo:
            try:
                leaf.grad = gradient
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
                if value is not None:
                    leaf.copy_(value)
            except Exception as another:
                note(error, f"after that, something could not be put back: {another!r}")


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
