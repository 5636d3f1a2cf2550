"""How shares become gradients. One pass here; add-ons make other schedules of the same parts::

one pass      every sub-step runs forward, loss and backward         Schedule
two passes    forward, one loss of all rows, forward and backward    TwoPasses
captured      one pass, whose sub-steps are launched as one          Captured
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scatterpar.step.attempt import Attempt
from scatterpar.step.outputs import check_entries, returned_outputs
from scatterpar.step.reduce import Computed
from scatterpar.step.request import Request
from scatterpar.step.scatter import BatchList
from scatterpar.step.substeps import (
    EagerSubsteps,
    ReplicaTask,
    detached_output,
    train_share,
)


class Schedule:
    """One pass: each replica adds up the gradient of its sub-steps' losses.

    Attributes:
        replicas_of_criterion: the number of replicas of the criterion; ``None`` for as many as the
            module has.
    """

    replicas_of_criterion: int | None = None

    def data(self, request: Request) -> BatchList:
        """The rows to scatter: for each batch its first row's number, its inputs and targets."""
        return request.batch

    def weights_apply(self) -> bool:
        """Whether each micro-batch has a loss, which has a factor in the loss of the batch."""
        return True

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> EagerSubsteps:
        """What runs the sub-steps of one replica in one step."""
        return EagerSubsteps(task, attempt.request)

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run all sub-steps. Afterwards the replicas have the gradients."""
        work = partial(train_share, attempt=attempt, substeps=partial(self.substeps, attempt))
        with attempt.forward_passes():
            results = attempt.run(work, tasks)
        # Not sum(): from Python 3.12 on it compensates, and so rounds in another way.
        loss = functools.reduce(operator.add, [result.loss for result in results])
        outputs = [result.outputs for result in results]
        compute_rows = partial(_returned_output, return_outputs=attempt.request.return_outputs)
        check_entries(attempt, tasks[0], outputs, compute_rows)
        returned = returned_outputs(attempt, tasks, outputs)
        return Computed(loss, results[0].dtype, returned)


def _returned_output(
    task: ReplicaTask, rows: Any, return_outputs: bool | Callable[[Any], Any]
) -> Any:
    return detached_output(task.output_of(rows[0]), return_outputs)
