"""accum="auto": the fewest sub-steps that fit into memory.

The whole step runs with the number that fitted last. If memory runs out, the number is
doubled until a trial fits, then the gap is halved. The smallest number that fits is
tried with a whole step. A trial runs two sub-steps per replica, which have a whole
step's peak of memory::

    accum=1   whole step   memory runs out
    accum=2   trial        memory runs out
    accum=4   trial        fits
    accum=3   trial        memory runs out
    accum=4   whole step   fits, and is kept
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from scatterpar.devices.memory import is_out_of_memory
from scatterpar.errors import warn
from scatterpar.plan import Plan, make_plan
from scatterpar.step.attempt import Extent
from scatterpar.step.request import Request

_TRIAL = Extent(is_trial=True, max_substeps=2, retain_rows=False)


class AutoAccum:
    """What an engine knows of its memory; copies of the engine know it, too.

    Attributes:
        accum: the number of sub-steps that fitted last.
        retain_rows: whether rows may stay on their device for a second pass, until
            memory has run out once.
    """

    def __init__(self) -> None:
        self.accum = 1
        self.retain_rows = True


@dataclass
class Candidate:
    """A line of the search: what to try.

    Attributes:
        accum: the number of sub-steps per replica.
        request: the user's request, without outputs in a trial.
        plan: that of ``accum``.
        extent: a whole step, or a trial.
        fits: whether memory has not run out.
    """

    accum: int
    request: Request
    plan: Plan
    extent: Extent
    fits: bool = True


class Search:
    """The search of one step.

    Attributes:
        retries: how often memory has run out.
    """

    def __init__(
        self,
        auto_accum: AutoAccum,
        request: Request,
        device_ids: Sequence[torch.device],
        shares: Sequence[float],
    ) -> None:
        self.retries = 0
        self._auto_accum = auto_accum
        self._request = request
        self._device_ids = device_ids
        self._shares = shares
        # Then a sub-step has one row.
        self._most = -(-max(request.sizes) // len(device_ids))

    def candidates(self) -> Iterator[Candidate]:
        """What to try next; the caller stops at a whole step that fits.

        If a candidate fails, the caller asks ``goes_on`` before it takes the next one.
        """
        accum = self._auto_accum.accum
        while True:
            whole = self._whole_step(accum)
            yield whole
            if whole.extent.retain_rows:
                self._auto_accum.retain_rows = False
                yield self._whole_step(accum)
            too_few = accum
            enough = None
            while enough is None or enough > too_few + 1:
                if enough is None:
                    accum = min(2 * too_few, self._most)
                else:
                    accum = (too_few + enough + 1) // 2
                trial = self._trial(accum)
                yield trial
                if trial.fits:
                    enough = accum
                else:
                    too_few = accum
            accum = enough

    def _whole_step(self, accum: int) -> Candidate:
        plan = self._plan(accum)
        # With one sub-step per replica no rows are needed a second time.
        computes_twice = self._request.whole_batch and len(plan.substep_rows) > len(
            plan.shares
        )
        retain_rows = self._auto_accum.retain_rows and computes_twice
        return Candidate(accum, self._request, plan, Extent(retain_rows=retain_rows))

    def _trial(self, accum: int) -> Candidate:
        # A function that selects outputs is the user's: trials do not call it.
        request = replace(self._request, return_outputs=False)
        return Candidate(accum, request, self._plan(accum), _TRIAL)

    def _plan(self, accum: int) -> Plan:
        return make_plan(
            self._request.sizes, self._device_ids, accum, shares=self._shares
        )

    def goes_on(self, candidate: Candidate, error: Exception) -> bool:
        """Whether there is more to try after a candidate has raised ``error``.

        If memory ran out, and no number of sub-steps is left, ``error`` gets a note.
        """
        if not is_out_of_memory(error):
            # The whole step will raise the error of a trial, as for one row in a norm.
            return candidate.extent.is_trial
        self.retries += 1
        candidate.fits = False
        if candidate.extent.retain_rows or candidate.accum < self._most:
            return True
        error.add_note(
            f'accum="auto" has nothing left to try: with {candidate.accum} sub-steps a '
            f"sub-step is one row, and that does not fit ({self.retries} tries ran out "
            f"of memory)"
        )
        return False

    def keep(self, candidate: Candidate) -> None:
        """Begin later steps with the candidate's number; warn if it is another one."""
        earlier = self._auto_accum.accum
        self._auto_accum.accum = candidate.accum
        if candidate.accum != earlier:
            warn(
                f'accum="auto": {self._request.rows} rows with accum={earlier} ran out '
                f"of memory; accum={candidate.accum} is the smallest that fits, and is "
                f"kept"
            )
