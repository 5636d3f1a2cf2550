"""All replicas' sub-steps: gradients are in the replicas afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from scatterpar.replicas.replicas import Replicas, guarded
from scatterpar.step.rehearsal import rehearse
from scatterpar.step.request import Request
from scatterpar.step.substeps import Result, loss_at, prepare_autograd, train
from scatterpar.step.task import Task
from scatterpar.step.two_passes import train_whole
from scatterpar.step.whole_batch import Peers
from scatterpar.threads.attempt import Attempt

__all__ = ["compute"]


class _Look(Protocol):
    """Looks at some of the sub-steps: do their losses combine as they should?"""

    def see(self, replica: int, number: int, output: Any) -> None:
        """Is shown each output, before the criterion has it."""

    def judge(self, attempt: Attempt, tasks: Sequence[Task], results: Sequence[Result]) -> None:
        """Raises what the user has to know."""


def compute(
    attempt: Attempt,
    request: Request,
    tasks: Sequence[Task],
    parts: Sequence[Replicas],
    criterion: Any,
    look: _Look | None,
    peers: Peers | None,
) -> list[Result]:
    """Every replica's sub-steps, each by its worker.

    Args:
        attempt: the step.
        request: what the user asked for.
        tasks: what each replica is given to do.
        parts: the replicas of the model, and those of the criterion.
        criterion: as it is on the master.
        look: looks at some of them.
        peers: other processes, whose outputs the criterion of a whole batch sees too.

    Returns:
        What each replica made of its share.
    """
    prepare_autograd()
    with guarded(parts):
        if request.whole_batch:
            rehearse(attempt, tasks, parts, Task.output_of)
            peers = None if request.most else peers  # a trial is this process's own
            return train_whole(attempt, request, tasks, parts, criterion, peers)
        rehearse(attempt, tasks, parts, loss_at)
        work = partial(train, request=request, see=look.see if look else None)
        results = attempt.run(work, tasks)
        if look:
            look.judge(attempt, tasks, results)
        return results
