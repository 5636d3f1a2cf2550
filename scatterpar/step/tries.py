"""The tries of one call: what is computed next, and who asks for it.

::

    while tries.result is None:
        with tries:  # chooses the next try after an error, and after a trial
            tries.result = compute(tries.present)
    result = tries.result
    tries.keep(result.attempt)

A try is undone before another one begins. Another one is asked for by ::

    the schedule    a graph computes something else than Python, or memory ran out with
                    graphs: the same, without graphs
    accum="auto"    memory ran out, or a trial of two sub-steps fits: other sub-steps
                    (``options/auto_accum.py``)
"""

from __future__ import annotations

from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from scatterpar.devices.memory import clear_frames
from scatterpar.plan import Plan
from scatterpar.step.attempt import WHOLE_STEP, Attempt, Extent
from scatterpar.step.request import Request
from scatterpar.step.substeps import Schedule
from scatterpar.threads.workers import Workers

Result = TypeVar("Result")


class Try(NamedTuple):
    """What an attempt computes.

    Attributes:
        request: what the user asked for.
        plan: which rows each replica computes, and in which sub-steps.
        extent: how much of the step is run.
    """

    request: Request
    plan: Plan
    extent: Extent = WHOLE_STEP


class Tries(Generic[Result]):
    """The tries of a call whose plan is fixed.

    In the body of ``with`` the present try is computed. An error that another try
    follows ends there; any other one is the caller's.

    Attributes:
        present: the try that is computed next.
        result: that of the whole call, from the end of its try until ``keep``; else
            ``None``.
    """

    def __init__(self, first: Try, schedule: Schedule | None, workers: Workers) -> None:
        """``schedule`` is ``None`` for a call without gradients."""
        self.present = first
        self.result: Result | None = None
        self._schedule = schedule
        self._workers = workers

    def __enter__(self) -> None:
        """Begin the present try."""

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> bool:
        """Choose the next try after an error, or after a trial.

        Returns whether another try follows ``error``.
        """
        if error is not None:
            return isinstance(error, Exception) and self.go_on_after(error)
        if self.present.extent.is_trial:
            self.result = None  # first: the next try needs its memory
            self.go_on_after(None)
        return False

    def go_on_after(self, error: Exception | None) -> bool:
        """Choose the try that follows the present one, which has raised ``error``.

        ``None`` for a trial that fits. Returns ``False`` if nobody asks for another
        try: the error is the caller's.
        """
        if error is None or self._schedule is None:
            return False
        if not self._schedule.drop_graphs_after(error):
            return False
        self._free(error)
        return True

    def keep(self, attempt: Attempt) -> None:
        """Accept the present try as the whole call. The caller has the result."""
        self.result = None

    def _free(self, error: Exception | None) -> None:
        """Free the memory of the present try, which the next one needs.

        Cached memory, too: it is cut to sizes that the next try does not need.
        """
        if error is not None:
            clear_frames(error)
        self._workers.release()
