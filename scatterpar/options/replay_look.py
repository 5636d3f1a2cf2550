"""A replayed sub-step beside the same sub-step run eagerly.

::

    eager    = loss and gradients of a micro-batch, by the replica's own code
    replayed = the same by its graph, from the same state and random numbers

They differ if a value has changed that the graph has frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.transfers import to_numbers
from scatterpar.state.journal import Journal
from scatterpar.state.walk import Walk
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss import forward
from scatterpar.step.substeps import set_aside
from scatterpar.step.task import ReplicaTask
from scatterpar.verify.comparison import (
    SMALLEST_SCALE,
    LeafGradients,
    relative_difference,
)
from scatterpar.verify.dropped_records import records_dropped
from scatterpar.verify.rounding import Rounding


@dataclass(frozen=True)
class Comparison:
    """How a replayed sub-step differs from the same sub-step run eagerly.

    Attributes:
        difference: the largest relative difference of the loss or of a gradient; NaN if
            neither can be compared.
        limit: the largest one that rounding explains.
        draws: whether the sub-step drew random numbers. A graph may draw others.
    """

    difference: float
    limit: float
    draws: bool

    @property
    def differs(self) -> bool:
        """Whether more than rounding differs."""
        return self.difference > self.limit


def compare(
    attempt: Attempt, task: ReplicaTask, rows: Any, replay: Callable[[], Tensor]
) -> Comparison:
    """Run a micro-batch eagerly and by ``replay``, and restore all state.

    ``replay`` adds gradients to the replica's leaves and returns the loss, as a static
    tensor.
    """
    task = replace(task, clock=None)
    request = attempt.request
    roots = [
        attempt.replicas.of_model.root,
        task.criterion,
        request.criterion,
        request.count,
    ]
    # The eager run is one call of user code more than the step has.
    state = Journal(Walk(roots), [task.share.device])
    rounding = Rounding(task.share.device)
    number = task.share.replica
    generators = attempt.generators

    def eager() -> Tensor:
        copied = nested.map_tensors(Tensor.clone, rows)
        _, loss = forward(task, copied)
        rounding.watch(loss)
        factor = torch.full_like(loss, request.scale, requires_grad=False)
        task.run_backward(0, [loss], [factor])
        return loss.detach()

    with state.restored():
        with task.isolated(generators), records_dropped():
            before = generators.get_state(number)
            expected_loss, expected = _result(task, eager)
            # A graph draws from an offset of its own, so other numbers are no fault.
            draws = not _equal(before, generators.get_state(number))
        state.restore()
        with task.isolated(generators):
            actual_loss, actual = _result(task, replay)
    scale = max(abs(expected_loss), abs(actual_loss), SMALLEST_SCALE)
    of_losses = abs(expected_loss - actual_loss) / scale
    of_gradients, _ = relative_difference(actual, expected)
    difference = max(of_losses, of_gradients)
    if not math.isfinite(expected_loss):
        difference = math.nan
    # The same kernels compute the same rows: a whole step's limit is enough.
    limit = min(rounding.limit, rounding.tolerance)
    return Comparison(difference, limit, draws)


def _result(
    task: ReplicaTask, run: Callable[[], Tensor]
) -> tuple[float, LeafGradients]:
    """The loss of ``run``, and the gradients that it adds to the replica's leaves.

    They are no copies: a replay's are static tensors, which the next one writes.
    """
    with set_aside(task.leaves):
        (loss,) = to_numbers(run().reshape(1))
        # Inside, because afterwards the leaves have their earlier gradients again.
        gradients = [leaf.grad for leaf in task.leaves]
    return loss, gradients


def _equal(
    before: Mapping[torch.device, Tensor], after: Mapping[torch.device, Tensor]
) -> bool:
    """Whether no generator has moved; one that was made since then has drawn."""
    if before.keys() != after.keys():
        return False
    return all(torch.equal(before[device], after[device]) for device in before)
