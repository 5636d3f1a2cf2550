"""accum="auto": the fewest sub-steps that fit into memory, from the number of the last step on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scatterpar.devices.runtime import clear_frames, is_out_of_memory
from scatterpar.plan import Plan
from scatterpar.report import warn
from scatterpar.step.reduce import Outcome
from scatterpar.step.request import Request


class _Search:
    """The number of sub-steps to try next.

    The first is ``start``. If memory runs out, numbers are doubled until a trial fits, then
    bisected; the smallest that fits is tried with a whole step. With the ``largest`` number a
    sub-step has one row.
    """

    def __init__(self, start: int, largest: int) -> None:
        self._failed = start - 1  # no number up to this is tried
        self.fits = start  # tried first, then the smallest that a trial fitted with; 0: none
        self._largest = largest
        self.retries = 0  # tries that ran out of memory

    @property
    def is_whole(self) -> bool:
        """Whether the next try is the whole step, not a trial."""
        return self.fits == self._failed + 1

    @property
    def number(self) -> int:
        """The number of sub-steps of the next try."""
        if self.fits:
            return (self._failed + self.fits + 1) // 2
        return min(2 * self._failed, self._largest)

    def ran_out(self, error: Exception) -> None:
        """Note that ``number`` does not fit. Raises ``error`` if more sub-steps cannot help."""
        self.retries += 1
        number = self.number
        if hasattr(error, "more_substeps_cannot_help"):
            raise error
        if number >= self._largest:
            error.add_note(
                f'accum="auto" has nothing left to try: with {number} sub-steps a sub-step is one '
                f"row, and that does not fit ({self.retries} tries ran out of memory)"
            )
            raise error
        self._failed, self.fits = number, 0 if self.is_whole else self.fits


class AutoAccum:
    """Searches the number of sub-steps; ``accum`` is the number that fitted last."""

    def __init__(self) -> None:
        self.accum = 1
        self._retain_rows = True  # for a second pass; given up as soon as memory runs out

    def fit(
        self,
        request: Request,
        replicas: int,
        plan: Callable[[int], Plan],
        compute: Callable[..., Outcome],
        release: Callable[[], None],
    ) -> Outcome:
        """The outcome with ``accum`` sub-steps, or with the fewest more that fit into memory.

        First runs the whole step with the number that fitted last. If memory runs out, doubles the
        number until a trial of two sub-steps fits, then bisects.
        """
        search = _Search(self.accum, -(-max(request.sizes) // replicas))
        while True:
            is_whole, cut = search.is_whole, plan(number := search.number)
            retain_rows = is_whole and self._retain_rows and _has_two_passes(request, cut)
            try:
                if is_whole:
                    outcome = compute(request, cut, retain_rows=retain_rows)
                    break
                # Two sub-steps per replica have a whole step's peak of memory.
                trial = replace(request, return_outputs=False)
                compute(trial, cut, max_substeps=2, retain_rows=False).attempt.undo()
                search.fits = number
            except Exception as error:
                if not is_out_of_memory(error):
                    if is_whole:
                        raise
                    search.fits = number  # the whole step will raise it, as for one row in a norm
                elif retain_rows and not hasattr(error, "more_substeps_cannot_help"):
                    search.retries += 1
                    self._retain_rows = False
                else:
                    search.ran_out(error)
                clear_frames(error)
            release()
        start, self.accum = self.accum, number
        if number != start:
            with outcome.attempt:  # warnings may be errors
                warn(
                    f'accum="auto": {request.rows} rows with accum={start} ran out of memory; '
                    f"accum={number} is the smallest that fits, and is kept"
                )
        return replace(outcome, retries=search.retries)


def _has_two_passes(request: Request, cut: Plan) -> bool:
    return request.whole_batch and any(len(share.micro_batches) > 1 for share in cut.shares)
