"""A replayed sub-step beside the same sub-step run eagerly.

::

    eager    = loss and gradients of a micro-batch, by the replica's own code
    replayed = the same by its graph, from the same state and random numbers

They differ if a value has changed that the graph has frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.transfers import to_numbers
from scatterpar.numerics.comparison import Result
from scatterpar.numerics.rounding import Rounding
from scatterpar.state.journal import Journal
from scatterpar.state.walk import Walk
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss import forward
from scatterpar.step.substeps import set_aside
from scatterpar.step.task import ReplicaTask
from scatterpar.verify.dropped_records import records_dropped


def difference_of_replay(
    attempt: Attempt,
    task: ReplicaTask,
    rows: Any,
    replay: Callable[[ReplicaTask], Tensor],
) -> float:
    """Run a micro-batch eagerly and by ``replay``, and restore all state.

    ``replay`` adds gradients to the replica's leaves and returns the loss, as a static
    tensor.

    Returns the largest relative difference of the loss or of a gradient. 0 if rounding
    explains it, if the losses cannot be compared, or if the sub-step draws random
    numbers: a graph draws from an offset of its own.
    """
    # A look is no sub-step: a trace does not show its parts.
    task = replace(task, is_profiled=False)
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
            expected = _result(task, eager)
            if generators.has_drawn(number) or not math.isfinite(expected.loss):
                return 0.0
        state.restore()
        with task.isolated(generators):
            actual = _result(task, partial(replay, task))
    difference = actual.difference_from(expected)
    # The same kernels compute the same rows: a whole step's limit is enough.
    limit = min(rounding.limit, rounding.tolerance)
    return difference if difference > limit else 0.0


def _result(task: ReplicaTask, run: Callable[[], Tensor]) -> Result:
    """The loss of ``run``, and the gradients that it adds to the replica's leaves.

    They are no copies: a replay's are static tensors, which the next one writes.
    """
    with set_aside(task.leaves):
        (loss,) = to_numbers(run().reshape(1))
        # Inside, because afterwards the leaves have their earlier gradients again.
        gradients: list[Any] = [leaf.grad for leaf in task.leaves]  # or ``None``
        return Result(loss, gradients)
