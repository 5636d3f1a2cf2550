"""The output and loss of one micro-batch, and the errors for what is no loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.errors import add_note
from scatterpar.step.criterion_closure import not_replicated, note_wrong_devices
from scatterpar.step.inner_backward import gradients_put_aside
from scatterpar.step.logged_numbers import NumbersToLog, are_with_loss, copied
from scatterpar.step.loss_weights import as_sum
from scatterpar.step.misfits import NO_TARGETS, misfit_of_criterion
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.torch_private.autograd import leaves_reached, nodes_of


def forward(
    task: ReplicaTask, rows: tuple[Any, Any] | None, sub_step: int = 0
) -> tuple[Any, Tensor, NumbersToLog]:
    """The output and loss of one micro-batch, and the criterion's numbers to log.

    Its rows arrive now if ``rows`` is ``None``.

    One replica at a time calls a criterion that they share: what a call stores in a
    network that it closes over, such as features that a hook keeps, the same call
    reads.
    """
    criterion = task.criterion
    if task.sums:
        criterion = as_sum(criterion)
    # Loaded here: a caller's stack might keep the inputs during the criterion.
    inputs, targets = task.rows_of(sub_step) if rows is None else rows
    # Turns before spans: in a trace, replicas that wait do not compute.
    with (
        task.turn(Scope.FUNCTION, sub_step),
        gradients_put_aside(task.leaves, task.replicas),
    ):
        with task.span("forward", sub_step):
            output = task.output_of(inputs)
            # A backward pass that needs no inputs lets them be freed before the
            # criterion.
            del rows, inputs
            if task.is_loss_of_torch:
                loss, numbers = loss_and_numbers(output, targets, criterion)
        if not task.is_loss_of_torch:
            loss, numbers = _loss_of_user(task, criterion, output, targets, sub_step)
    return output, loss, numbers


def _loss_of_user(
    task: ReplicaTask, criterion: Any, output: Any, targets: Any, sub_step: int
) -> tuple[Tensor, NumbersToLog]:
    """The loss of one micro-batch, from a criterion that is no loss of torch's.

    Raises ``ValueError`` if the loss reaches parameters of a network that no replica
    has. The graph shows them before they get a gradient, wherever the criterion hides
    them. Leaves that are no parameters may be the criterion's own.
    """
    nodes = nodes_of(nested.tensors(output))  # first: a criterion may write outputs
    with (
        task.turn(Scope.CRITERION, sub_step),
        task.span("criterion", sub_step),
        task.writes.watched("the criterion", "targets", targets) as watch,
    ):
        loss, numbers = loss_and_numbers(output, targets, criterion)
        watch.result = loss
    for leaf in leaves_reached(loss, nodes):
        if isinstance(leaf, nn.Parameter) and not any(
            leaf is known for known in task.leaves
        ):
            raise not_replicated(leaf, task.criterion)
    return loss, numbers


def loss_of(
    output: Any, targets: Any, criterion: Callable[[Any, Any], Any] | None
) -> Tensor:
    """The loss of one micro-batch, from the criterion or from the module's output."""
    loss, _ = loss_and_numbers(output, targets, criterion)
    return loss


def loss_and_numbers(
    output: Any, targets: Any, criterion: Callable[[Any, Any], Any] | None
) -> tuple[Tensor, NumbersToLog]:
    """The loss of one micro-batch, and the numbers to log that come with it."""
    if criterion is None:
        return scalar_loss(_loss_in(output), "the module"), {}
    try:
        result = criterion(output, targets)
    except Exception as error:
        if targets is None and "NoneType" in str(error):
            add_note(error, NO_TARGETS)
        for tensor in nested.tensors(output)[:1]:
            note_wrong_devices(error, criterion, tensor.device)
        misfit = None
        if isinstance(error, TypeError):
            misfit = misfit_of_criterion(criterion, output, targets)
        if misfit is None:
            raise
        raise misfit from error
    return loss_and_numbers_in(result)


def loss_and_numbers_in(result: Any) -> tuple[Tensor, NumbersToLog]:
    """The loss that a criterion has returned, and the numbers to log beside it."""
    if not are_with_loss(result):
        return scalar_loss(result, "the criterion"), {}
    loss = scalar_loss(result[0], "the criterion")
    return loss, copied(result[1], loss.device)


def _loss_in(output: Any) -> Any:
    """The loss in a module's output: the output, or its ``.loss`` or ``["loss"]``."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, Tensor):
        return output
    return getattr(output, "loss", output)


def scalar_loss(loss: Any, source: str) -> Tensor:
    """``loss``, if it is a real 0-dim tensor; else raises an error with ``source``."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{source} must give the loss as a 0-dim tensor, got "
            f"{type(loss).__name__}; {_instead_of(loss, source)}"
        )
    if loss.ndim:
        remedy = "reduce it"
        if source == "the module":
            remedy = "reduce it, or pass targets and a criterion"
        raise ValueError(
            f"{source} must give a 0-dim loss, got shape {tuple(loss.shape)}; {remedy}"
        )
    # torch refuses it in backward(), but not if a gradient is passed.
    if loss.is_complex():
        raise ValueError(
            f"{source} must give a real loss, got {loss.dtype}; take its .abs()"
        )
    return loss


def _instead_of(loss: Any, source: str) -> str:
    """The remedy for a loss that is no tensor, but may have one in it."""
    entries: dict[Any, Any] = {}
    if isinstance(loss, Mapping):
        entries = dict(loss)
    elif isinstance(loss, (tuple, list)):
        entries = dict(enumerate(loss))
    scalars = [
        key
        for key, entry in entries.items()
        if isinstance(entry, Tensor) and not entry.ndim
    ]
    if isinstance(loss, Mapping) and scalars and len(scalars) == len(entries):
        value = "sum(losses.values())"
        criterion = "criterion=lambda losses, _: sum(losses.values())"
    else:
        key = scalars[0] if scalars else 0  # many models return (logits, loss)
        value = "the tensor itself, without .item()"
        if entries:
            value = (
                "it alone, as by lambda output, targets: "
                f"criterion(output, targets)[{key!r}], or (loss, numbers) with a dict "
                "of numbers to log"
            )
        criterion = f"a criterion, such as lambda output, _: output[{key!r}]"
    if source == "the module":
        return (
            f"pass {criterion}, or return the loss, .loss or ['loss'] from the module"
        )
    return f"return {value}"


def require_trainable(module: Any) -> None:
    """Raise an error if no gradient can be computed: none is enabled, or required."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "a step under torch.no_grad() or inference_mode() has no gradient; make "
            "the step outside of this mode, or call engine.loss(…) if you need the "
            "loss only"
        )
    if not isinstance(module, nn.Module):
        return
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"the module, {type(module).__name__}, has no parameter that requires "
            f"grad: there is nothing to train; call .requires_grad_() on the "
            f"parameters that you want to train"
        )
