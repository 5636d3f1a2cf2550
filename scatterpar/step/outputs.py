"""The outputs of micro-batches, joined: those that the user asked for, and those of inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from scatterpar.batch.nested import have_entries, join_rows
from scatterpar.devices.runtime import no_kernel_search
from scatterpar.step.attempt import Attempt
from scatterpar.step.reduce import gather_to_master
from scatterpar.step.substeps import ReplicaTask, note_replica


def check_entries(
    attempt: Attempt,
    task: ReplicaTask,
    outputs: Sequence[Sequence[Any]],
    compute_rows: Callable[[ReplicaTask, Any], Any],
    is_module: bool = True,
) -> None:
    """Have the joined order checked if rows of each replica's ``outputs`` may have several entries.

    ``compute_rows(task, rows)`` returns the output for other rows. Raises ``ValueError`` if joined
    outputs are not those of one call, or if they are of a function that is not the module
    (``is_module``) and drew random numbers: how many it draws may depend on the rows.
    """
    plan, pieces = attempt.plan, [*chain(*outputs)]
    if len(pieces) > 1 and have_entries(pieces[0], attempt.request.dim, plan.substep_rows[0]):
        if not is_module and attempt.generators.drawn:
            raise ValueError(
                "the function draws random numbers and returns several entries per row, whose "
                "order cannot be compared with that of one call: return .view(rows, k, -1) of k "
                "entries per row"
            )
        if attempt.checks is not None:
            with no_kernel_search():  # the check has other sizes
                attempt.checks.check_join(attempt, task, compute_rows, pieces[0])


def returned_outputs(
    attempt: Attempt,
    tasks: Sequence[ReplicaTask],
    outputs: Sequence[Sequence[Any]],
) -> tuple[Any, ...]:
    """The outputs for ``return_outputs``: one entry per replica, or with costs one of all rows."""
    plan, request = attempt.plan, attempt.request
    attempt.transfers.synchronize()
    if not request.return_outputs:
        return ()
    join = partial(join_rows, dim=request.dim)
    sizes = [[stop - start for start, stop in task.share.micro_batches] for task in tasks]
    weights = [task.weights for task in tasks]
    if plan.order:
        on_master, factors = gather_to_master(outputs, plan, attempt.transfers), [*chain(*weights)]
        return (join(on_master, weights=factors, rows=plan.substep_rows, order=plan.order),)
    joined = []
    for task, pieces, rows, weights_of_share in zip(tasks, outputs, sizes, weights, strict=True):
        with note_replica(task.share):
            joined.append(join(pieces, weights=weights_of_share, rows=rows))
    return tuple(joined)
