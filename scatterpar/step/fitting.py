"""accum="auto": the fewest sub-steps that fit into memory, remembered from step to step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from scatterpar.devices.memory_search import MemorySearch, is_in_vain, is_out_of_memory
from scatterpar.plan import Plan
from scatterpar.report import warn
from scatterpar.step.outcome import Outcome
from scatterpar.step.request import Request

__all__ = ["Fitting"]


class Fitting:
    """What fitted last.

    Attributes:
        accum: so many sub-steps.
    """

    def __init__(self) -> None:
        self.accum = 1
        self._keeps_rows = True  # for a second pass; given up as soon as memory runs out

    def fit(
        self,
        request: Request,
        devices: Sequence[torch.device],
        plan: Callable[[int], Plan],
        compute: Callable[[Request, Plan], Outcome],
        release: Callable[[], None],
    ) -> Outcome:
        """The outcome with the fewest sub-steps that fit, from those that fitted last on.

        Args:
            request: what the user asked for.
            devices: one for each replica.
            plan: how the batch is cut, by the number of sub-steps.
            compute: the outcome of such a plan. What runs out of memory leaves no trace.
            release: gives back memory that nobody uses any more.
        """
        start, most = self.accum, -(-max(request.sizes) // len(devices))
        lean, tries = replace(request, keeps_rows=False), []

        def attempt(accum: int) -> Outcome:
            cut = plan(accum)
            if self._keeps_rows:
                try:
                    return compute(request, cut)
                except Exception as error:
                    if not is_out_of_memory(error) or not _rows_are_kept(request, cut):
                        raise
                    self._keeps_rows = False
                    if is_in_vain(error):
                        raise
                    tries.append(accum)
                    traceback.clear_frames(error.__traceback__)
                release()
            return compute(lean, cut)

        search = MemorySearch(
            most,
            attempt,
            trial=lambda accum: compute(lean.as_trial(), plan(accum)).attempt.undo(),
            release=release,
        )
        self.accum, outcome = search.smallest(start)
        if self.accum != start:
            with outcome.attempt:  # the user may make errors of warnings
                warn(
                    f'accum="auto": {request.rows} rows with accum={start} ran out of memory; '
                    f"accum={self.accum} is the smallest that fits, and is kept"
                )
        return replace(outcome, retries=search.retries + len(tries))


def _rows_are_kept(request: Request, plan: Plan) -> bool:
    """Whether any rows wait on a device for a second pass."""
    return request.whole_batch and any(len(share.micro_batches) > 1 for share in plan.shares)
