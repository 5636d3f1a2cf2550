"""accum="auto": the fewest sub-steps that fit into memory, remembered from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scatterpar.devices.memory_search import smallest_that_fits
from scatterpar.plan import Plan
from scatterpar.report import warn
from scatterpar.step.outcome import Outcome
from scatterpar.step.request import Request

__all__ = ["Fitting"]


class Fitting:
    """How many sub-steps fitted last.

    Attributes:
        accum: that number.
    """

    def __init__(self) -> None:
        self.accum = 1

    def fit(
        self,
        request: Request,
        replicas: int,
        plan: Callable[[int], Plan],
        compute: Callable[[Request, Plan], Outcome],
    ) -> Outcome:
        """The outcome with the fewest sub-steps that fit, from those that fitted last on.

        Args:
            request: what the user asked for.
            replicas: how many there are.
            plan: how the batch is cut, by the number of sub-steps.
            compute: the outcome of such a plan. What runs out of memory leaves no trace.
        """
        start = self.accum
        self.accum, outcome, retries = smallest_that_fits(
            start,
            -(-max(request.sizes) // replicas),
            attempt=lambda accum: compute(request, plan(accum)),
            trial=lambda accum: compute(request.as_trial(), plan(accum)).attempt.undo(),
        )
        if retries:
            with outcome.attempt:  # the user may make errors of warnings
                warn(
                    f'accum="auto": {request.rows} rows with accum={start} ran out of memory; '
                    f"accum={self.accum} is the smallest that fits, and is kept"
                )
        return replace(outcome, retries=retries)
