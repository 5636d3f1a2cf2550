"""How shares become gradients. One pass here; add-ons make other schedules of the same parts::

one pass      every sub-step runs forward, loss and backward         Schedule
two passes    forward, one loss of all rows, forward and backward    TwoPasses
captured      one pass, whose sub-steps are launched as one          Captured
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.runtime import no_kernel_search
from scatterpar.replicas.replicas import parameter_writes_refused
from scatterpar.step.attempt import Attempt, Proceed
from scatterpar.step.criterion_closure import (
    closure_contents,
    not_replicated,
    trained_leaves,
    training_buffers,
)
from scatterpar.step.reduce import returned_outputs
from scatterpar.step.scatter import ShareLoader
from scatterpar.step.substeps import (
    Computed,
    ReplicaTask,
    Substeps,
    detached_output,
    make_tasks,
)
from scatterpar.torch_private import hooks_taken_off


class Schedule:
    """One pass: each replica adds up the gradient of its sub-steps' losses.

    Attributes:
        has_losses: whether each micro-batch has a loss, with a factor in the loss of the batch.
            Otherwise the criterion and all targets are on the master alone.
    """

    has_losses = True

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """What runs the sub-steps of one replica in one step."""
        return Substeps(task, attempt.request)

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run all sub-steps. Afterwards the replicas have the gradients."""

        def train(task: ReplicaTask, *, proceed: Proceed) -> Computed:
            return self.substeps(attempt, task).train(attempt.max_substeps, proceed)

        def returned(task: ReplicaTask, rows: Any) -> Any:
            return detached_output(task.output_of(rows[0]), request.return_outputs)

        request = attempt.request
        with parameter_writes_refused(attempt.replicas.replica_sets):
            results = attempt.run(train, tasks)
        # Not sum(): from Python 3.12 on it compensates, and so rounds in another way.
        loss = functools.reduce(operator.add, [result.loss for result in results])
        pieces = [result.outputs for result in results]
        if request.return_outputs:
            attempt.check_join(attempt, tasks[0], pieces, returned)
        return Computed(loss, results[0].dtype, returned_outputs(attempt, pieces))


def compute(attempt: Attempt, loaders: Sequence[ShareLoader], schedule: Schedule) -> Computed:
    """Run every replica's sub-steps, each in its worker; the replicas then have the gradients.

    User code that runs meanwhile may move generators and statistics of networks that it refers to,
    which are restored if the step fails. Raises ``ValueError`` if a gradient arrives at the user's
    own leaves, or at those that the criterion or an object in the module refers to.
    """
    criterion, sets = attempt.request.criterion, attempt.replicas.replica_sets
    held = closure_contents(criterion)
    shared = [[*each.contents.objects.values()] for each in sets]
    held += closure_contents(shared) if any(shared) else []
    if held:
        generators = [value for value in held if isinstance(value, torch.Generator)]
        attempt.save_for_undo(training_buffers(held), generators=generators)
    trained = [leaf for each in sets for leaf in each.trained_tensors]
    attempt.user_leaves = leaves = trained_leaves([*trained, *held])
    with set_aside(leaves):
        tasks = make_tasks(attempt, loaders)
        if attempt.check is not None:
            with attempt.span("verify"), no_kernel_search():  # a check has other sizes
                attempt.check(attempt, tasks[: len(attempt.replicas.criteria)])
        computed = schedule.run(attempt, tasks)
        attempt.transfers.synchronize()
        for leaf in leaves:
            if leaf.grad is not None:
                raise not_replicated(leaf, criterion)
    return computed


@contextlib.contextmanager
def set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """In the body, ``leaves`` have no ``.grad`` and no hooks; afterwards both are as before.

    Replicas add gradients to copies of the user's parameters. A gradient that arrives in a leaf of
    the user comes from an object that replicas share, and so is added in the order of arrival.
    """
    gradients = [leaf.grad for leaf in leaves]
    with hooks_taken_off(leaves):
        try:
            for leaf in leaves:
                leaf.grad = None
            yield
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
