"""One call per replica, with the random numbers of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from scatterpar.devices.ledger import Clock
from scatterpar.plan import Plan
from scatterpar.step.substeps import noted
from scatterpar.threads.crew import Task, run_shares
from scatterpar.threads.randomness import RandomStreams
from scatterpar.threads.workers import Workers

__all__ = ["run_each"]

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def run_each(
    workers: Workers,
    plan: Plan,
    functions: Sequence[Callable[..., Any]],
    calls: Sequence[Any],
    around: contextlib.AbstractContextManager[object] = _NOTHING,
) -> list[Any]:
    """Call each share's function on its device, all at once; what is raised names the replica.

    What ``around`` raises at its end ends the call likewise, without a trace.
    """

    def apply(task: Task, *, proceed: Callable[[], None]) -> Any:
        args, kwargs = task.inputs
        with noted(task.share):
            return task.module(*args, **kwargs)

    tasks = [Task(*parts) for parts in zip(plan.shares, functions, calls, strict=True)]
    streams = RandomStreams([share.device for share in plan.shares])
    try:
        with around:
            results = run_shares(workers, streams, apply, tasks, Clock())
    except BaseException:
        streams.rollback()
        raise
    streams.commit()
    return results
