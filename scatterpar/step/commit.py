"""What a step computed, written to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.buffers import Writing, running
from scatterpar.step.outcome import Outcome
from scatterpar.threads.workers import Attempt
from scatterpar.torch_private import are_observed, backward, has_gradient_hooks

_Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it
_DTYPE, _GRAD_DTYPE, _LAYOUT = map(attrgetter, ("dtype", "grad_dtype", "layout"))


def commit(outcome: Outcome) -> None:
    """Write gradients, buffers and random state, or leave all of them as they are.

    What takes memory is made first. Parameters without a gradient take those that came, if all fit
    and nothing hangs on any parameter; else autograd itself hands gradients over. So hooks
    run as under a plain ``backward()``, once and on the whole gradient; if one fails, the
    attempt puts all back. The rest takes no memory, and runs no code of the user's.
    """
    pairs = [(leaf, g) for leaf, g in outcome.gradients if g is not None]
    outcome.gradients.clear()
    moments = [value for layer in outcome.layers for value in running(layer)]
    unplanned = moments if outcome.writings else [*outcome.buffers, *moments]
    writings = [*outcome.writings, Writing(unplanned)]
    leaves = [leaf for leaf, _ in pairs]
    earlier, observed = [(leaf, leaf.grad) for leaf in leaves], are_observed(leaves)
    _remember(pairs, earlier, observed, outcome.attempt)
    are_first = not observed and all(was is None for _, was in earlier) and _all_fit(pairs)
    outcome.attempt.generators.commit()  # before hooks, which may draw
    if are_first:
        for leaf, gradient in pairs:
            leaf.grad = gradient
        pairs.clear()
    _hand_over(pairs)
    for write in writings:
        write()


def _remember(
    pairs: Sequence[_Pair],
    earlier: Sequence[tuple[Tensor, Tensor | None]],
    observed: bool,
    attempt: Attempt,
) -> None:
    """What is put back where adding gradients fails, as hooks may, or what takes memory in it."""
    both = zip(earlier, pairs, strict=True)
    old = [(was, gradient) for (_, was), (_, gradient) in both if was is not None]
    may_fail = observed or any(
        was.layout != torch.strided or was.dtype != g.dtype for was, g in old
    )
    written = [was for was, _ in old if may_fail]
    written += [leaf for leaf, _ in pairs if observed and has_gradient_hooks(leaf)]
    attempt.keep(written, earlier)


def _all_fit(pairs: Sequence[_Pair]) -> bool:
    """Whether autograd would make these very gradients the first ones of the leaves."""
    leaves, gradients = [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]
    return (
        {nn.Parameter, Tensor}.issuperset(map(type, leaves))
        and {Tensor}.issuperset(map(type, gradients))
        and {torch.strided}.issuperset(map(_LAYOUT, gradients))
        and list(map(_DTYPE, gradients)) == list(map(_GRAD_DTYPE, leaves))
        and list(map(Tensor.stride, gradients)) == list(map(Tensor.stride, leaves))
        and all(g.untyped_storage().nbytes() == g.nbytes for g in gradients)
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
