"""The tries of one call: what is computed next, and who asks for it.

::

    while True:
        try:
            result = compute(tries.present)
        except Exception as error:
            if not tries.go_on_after(error):
                raise
        else:
            if not tries.present.extent.is_trial:
                break
            del result  # the next try needs its memory
            tries.go_on_after(None)
    tries.keep(result.attempt)

A try is undone before another one begins. Another one is asked for by ::

    the schedule    a graph computes something else than Python, or memory ran out with
                    graphs: the same, without graphs
    accum="auto"    memory ran out, or a trial of two sub-steps fits: other sub-steps
                    (``options/auto_accum.py``)
"""

from __future__ import annotations

from typing import NamedTuple

from scatterpar.devices.memory import clear_frames
from scatterpar.plan import Plan
from scatterpar.step.attempt import WHOLE_STEP, Attempt, Extent
from scatterpar.step.request import Request
from scatterpar.step.substeps import Schedule
from scatterpar.threads.workers import Workers


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


class Tries:
    """The tries of a call whose plan is fixed.

    Attributes:
        present: the try that is computed next.
    """

    def __init__(self, first: Try, schedule: Schedule | None, workers: Workers) -> None:
        """``schedule`` is ``None`` for a call without gradients."""
        self.present = first
        self._schedule = schedule
        self._workers = workers

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
        """The present try was the whole call."""

    def _free(self, error: Exception | None) -> None:
        """Free the memory of the present try, which the next one needs.

        Cached memory, too: it is cut to sizes that the next try does not need.
        """
        if error is not None:
            clear_frames(error)
        self._workers.release()
