"""All replicas' sub-steps: gradients are in the replicas afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scatterpar.replicas.replicas import Replicas, guarded
from scatterpar.step.rehearsal import rehearse
from scatterpar.step.request import Request
from scatterpar.step.substeps import Result, loss_at, prepare_autograd, train
from scatterpar.step.task import Task
from scatterpar.step.two_passes import output_at, train_whole
from scatterpar.step.whole_batch import Peers
from scatterpar.threads.attempt import Attempt

__all__ = ["compute"]


def compute(
    attempt: Attempt,
    request: Request,
    tasks: Sequence[Task],
    parts: Sequence[Replicas],
    criterion: Any,
    look: Callable[[Attempt, Request, Sequence[Task], Sequence[Replicas], Peers | None], None],
    peers: Peers | None,
) -> list[Result]:
    """Every replica's sub-steps, each by its worker.

    Args:
        attempt: the step.
        request: what the user asked for.
        tasks: what each replica is given to do.
        parts: the replicas of the model, and those of the criterion.
        criterion: as it is on the master.
        look: looks at a few rows first; raises what the user has to know.
        peers: other processes, whose outputs the criterion of a whole batch sees too.

    Returns:
        What each replica made of its share.
    """
    prepare_autograd()
    with guarded(parts):
        if request.whole_batch:
            rehearse(attempt, tasks, parts, output_at)
            peers = None if request.most else peers  # a trial is this process's own
            return train_whole(attempt, request, tasks, parts, criterion, peers)
        rehearse(attempt, tasks, parts, loss_at)
        look(attempt, request, tasks, parts, peers)
        return attempt.run(partial(train, request=request), tasks)
