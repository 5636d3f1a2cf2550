"""accum="auto": the fewest sub-steps that fit into memory, remembered from step to step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from scatterpar.devices.memory_search import MemorySearch, is_in_vain, is_out_of_memory
from scatterpar.plan import Plan
from scatterpar.report import warn
from scatterpar.step.markers import all_tensors
from scatterpar.step.outcome import Outcome
from scatterpar.step.request import Request

__all__ = ["Fitting"]


class Fitting:
    """What fitted last.

    Attributes:
        accum: so many sub-steps.
        one_by_one: with shares that arrive micro-batch by micro-batch, since whole ones leave too
            little memory.
    """

    def __init__(self) -> None:
        self.accum = 1
        self.one_by_one = False

    def fit(
        self,
        request: Request,
        devices: Sequence[torch.device],
        plan: Callable[[int], Plan],
        compute: Callable[[Request, Plan], Outcome],
        release: Callable[[], None],
    ) -> Outcome:
        """The outcome with the fewest sub-steps that fit, from those that fitted last on.

        Where no number of them does, shares of what has to cross arrive micro-batch by micro-batch.

        Args:
            request: what the user asked for.
            devices: one for each replica.
            plan: how the batch is cut, by the number of sub-steps.
            compute: the outcome of such a plan. What runs out of memory leaves no trace.
            release: gives back memory that nobody uses any more.
        """
        start, most = self.accum, -(-max(request.sizes) // len(devices))

        def search(request: Request) -> MemorySearch[Outcome]:
            return MemorySearch(
                most,
                attempt=lambda accum: compute(request, plan(accum)),
                trial=lambda accum: compute(request.as_trial(), plan(accum)).attempt.undo(),
                release=release,
            )

        searches = [search(request)]
        try:
            self.accum, outcome = searches[0].smallest(start)
        except Exception as error:
            if not _others_may_fit(request, devices, error):
                raise
            traceback.clear_frames(error.__traceback__)
            searches.append(search(replace(request, one_by_one=True)))
        if len(searches) > 1:
            release()
            searches[1].require_any()
            self.accum, outcome = searches[1].smallest(start)
            self.one_by_one = True
        retries = sum(each.retries for each in searches)
        if retries:
            with outcome.attempt:  # the user may make errors of warnings
                warn(self._what_fits(request.rows, start))
        return replace(outcome, retries=retries)

    def _what_fits(self, rows: int, start: int) -> str:
        how = ", with shares that arrive micro-batch by micro-batch" if self.one_by_one else ""
        return (
            f'accum="auto": {rows} rows with accum={start} ran out of memory; accum={self.accum} '
            f"is the smallest that fits{how}, and is kept"
        )


def _others_may_fit(
    request: Request, devices: Sequence[torch.device], error: BaseException
) -> bool:
    """Whether what arrives one by one may fit: it came whole, from elsewhere, and ran out."""
    homes = {tensor.device for tensor in all_tensors(request.batch)}
    came_whole = not request.one_by_one and homes != set(devices)
    return came_whole and is_out_of_memory(error) and not is_in_vain(error)
