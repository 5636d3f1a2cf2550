"""Write the results of a step to the user's module.

This runs after every replica has succeeded, and nothing else writes there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import is_part, is_unexpanded
from scatterpar.devices.copies import to_numbers
from scatterpar.errors import restore_after
from scatterpar.replicas.buffers import BufferWriter
from scatterpar.step.attempt import Attempt
from scatterpar.step.prepared_commit import Pair
from scatterpar.step.reduce import Outcome
from scatterpar.step.returned_loss import FinishedLoss
from scatterpar.step.undo import Undo
from scatterpar.torch_private.autograd import are_observed, backward, has_gradient_hooks
from scatterpar.torch_private.compiler import never_compiled
from scatterpar.torch_private.tensors import of_class


def commit(outcome: Outcome, *, deferred: bool) -> Tensor:
    """Write gradients, buffers and random state, or leave all of them as they are.

    With ``deferred``, an autograd node behind the loss holds the gradients until the
    backward pass of the loss. Otherwise they are assigned, or a backward pass through
    such a node accumulates them at once, so hooks run as under a plain ``backward()``:
    once, with the whole gradient.

    Returns the loss on the master, with a graph only if ``deferred``.
    """
    # Before the gradients are taken out.
    buffers, may_become_grads = outcome.prepared or outcome.prepared_commit()
    pairs: list[Pair] = []
    for leaf, gradient in outcome.gradients:
        if gradient is not None:
            pairs.append((leaf, gradient))
        del gradient  # autograd takes over the memory of what nobody else refers to
    # The list would keep all gradients alive while autograd adds them.
    outcome.gradients.clear()
    if deferred:
        # First, because it may raise. The rest cannot fail.
        loss = attach(outcome.loss_tensor, pairs, outcome.request.scale)
        outcome.attempt.generators.commit()
        buffers.write()
        return loss
    loss = of_class(outcome.loss_tensor(), FinishedLoss)
    if are_observed([leaf for leaf, _ in pairs]):
        _add_with_hooks(pairs, outcome.attempt, buffers)
    else:
        _add_gradients(pairs, outcome.attempt, may_become_grads=may_become_grads)
        buffers.write()  # last: it allocates no memory and runs no user code
    return loss


def _add_with_hooks(pairs: list[Pair], attempt: Attempt, buffers: BufferWriter) -> None:
    """Add gradients, write buffers, and run the user's hooks on gradients.

    Buffers come first, because hooks read them, write them, or write a parameter that
    shares their memory: what they write stays. If a hook raises, buffers are as before.
    """
    buffers.save()
    try:
        buffers.write()
        _add_gradients(pairs, attempt, observed=True)
    except BaseException as error:
        restore_after(error, buffers.restore)
        raise


def _add_gradients(
    pairs: list[Pair],
    attempt: Attempt,
    *,
    observed: bool = False,
    may_become_grads: bool = False,
) -> None:
    """Add gradients to ``.grad``, and commit random state.

    Without hooks that observe it, those that ``may_become_grads`` are assigned.
    """
    leaves = [leaf for leaf, _ in pairs]
    earlier = _save_for_undo(pairs, attempt.undo, observed)
    attempt.generators.commit()  # before hooks, which may draw
    # With one earlier gradient, autograd adds all.
    if may_become_grads and not earlier:
        for leaf, gradient in pairs:
            leaf.grad = gradient
    elif pairs:
        with torch.inference_mode(False), torch.enable_grad():
            root = attach(partial(torch.zeros, (), device=leaves[0].device), pairs)
            backward([root], [root.detach()])


def _save_for_undo(pairs: list[Pair], undo: Undo, observed: bool) -> list[Tensor]:
    """Save what changes while gradients are added: a hook may raise, memory run out.

    Returns the gradients that leaves have. Raises ``RuntimeError`` if one of these is
    an inference tensor.
    """
    undo.save_gradients([leaf for leaf, _ in pairs])
    earlier: list[Tensor] = []
    # Then autograd allocates nothing, so that nothing fails once it has begun.
    adds_in_place = True
    for leaf, gradient in pairs:
        if leaf.grad is not None:
            _require_no_inference_tensor(leaf, leaf.grad)
            earlier.append(leaf.grad)
            if leaf.grad.layout != torch.strided or leaf.grad.dtype != gradient.dtype:
                adds_in_place = False
    # Into one that cannot be written autograd raises, after it has added to others.
    adds_in_place = adds_in_place and all(map(_can_be_written, earlier))
    if observed or not adds_in_place:
        undo.save_values(filter(_can_be_written, earlier))
    if observed:  # a hook on a leaf may write the leaf
        undo.save_values(leaf for leaf, _ in pairs if has_gradient_hooks(leaf))
    return earlier


def _require_no_inference_tensor(leaf: Tensor, gradient: Tensor) -> None:
    """Raise ``RuntimeError`` if a ``.grad`` is one: autograd would add to it, and raise
    the same error too late.
    """
    if gradient.is_inference():
        raise RuntimeError(
            f"the .grad of a parameter of shape {tuple(leaf.shape)} was made under "
            "torch.inference_mode(), and autograd cannot add to such a tensor; set "
            "it to None, or assign a clone() made outside of inference mode"
        )


def _can_be_written(gradient: Tensor) -> bool:
    """Whether autograd can add to a ``.grad`` of the user's in place."""
    return gradient.layout != torch.strided or is_unexpanded(gradient)


def attach(
    make_root: Callable[[], Tensor], pairs: list[Pair], scale: float | None = None
) -> Tensor:
    """Returns a root whose backward pass gives leaves the gradients in ``pairs``.

    Clears ``pairs``. With a ``scale``, the gradient that arrives at the root, divided
    by the scale, multiplies the gradients.
    """
    if not pairs:  # the root needs a graph
        pairs = [(torch.zeros((), requires_grad=True), torch.zeros(()))]
    leaves = [leaf for leaf, _ in pairs]
    gradients: list[Tensor] = []
    for _, gradient in pairs:
        # A part keeps all of its message alive.
        gradients.append(gradient.clone() if is_part(gradient) else gradient)
        del gradient
    pairs.clear()
    root: Tensor = _ReturnGradients.apply(make_root, gradients, scale, *leaves)  # type: ignore[no-untyped-call]
    return root


class _ReturnGradients(torch.autograd.Function):
    """A node whose backward pass returns gradients that were computed before.

    AccumulateGrad takes over a new gradient's memory only if nothing else refers to it,
    as the caller of ``backward`` does to the gradients that it passes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        make_root: Callable[[], Tensor],
        gradients: list[Tensor],
        scale: float | None,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.scale = scale
        # A call of the step has frozen them: the gradients of earlier calls count.
        ctx.frozen = {
            number: leaf for number, leaf in enumerate(leaves) if not leaf.requires_grad
        }
        # Made here: a returned input would be a view, which cannot be written.
        return make_root()

    @staticmethod
    @never_compiled  # a compiled function may call ``backward()``
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_NO_GRAPH)
        if not ctx.gradients:
            raise RuntimeError(_TWICE)
        # In a free-threaded interpreter autograd's thread cannot drop a reference of
        # the caller's thread. A new tensor with the same memory has none.
        gradients = [
            gradient.detach() if gradient.layout == torch.strided else gradient
            for gradient in ctx.gradients
        ]
        # A second backward pass finds nothing, and autograd may take the memory over.
        ctx.gradients.clear()
        if ctx.scale is not None:
            factor_of_gradients = to_numbers(factor) / ctx.scale
            if factor_of_gradients != 1:
                for gradient in gradients:
                    gradient.mul_(factor_of_gradients)
        for number, leaf in ctx.frozen.items():
            earlier = leaf.grad
            gradient = gradients[number]
            leaf.grad = gradient if earlier is None else earlier + gradient
        return (None, None, None, *gradients)


_NO_GRAPH = (
    "create_graph=True: engine.loss(…) has computed the gradients already, and they "
    "have no graph; compute gradients of gradients inside the criterion or the module, "
    "or use plain torch for this loss"
)
_TWICE = (
    "a second backward pass through an engine's loss: the first one took the "
    "gradients, even with retain_graph=True; call engine.loss again, or add up "
    "everything that is computed from this loss, and call backward() on the sum, once"
)
