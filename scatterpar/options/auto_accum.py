"""accum="auto": the fewest sub-steps that fit into memory, from the number of the last
step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scatterpar.devices.memory import clear_frames, is_out_of_memory
from scatterpar.errors import warn
from scatterpar.plan import Plan
from scatterpar.step.reduce import Outcome
from scatterpar.step.request import Request


class AutoAccum:
    """Searches the number of sub-steps; ``accum`` is the number that fitted last."""

    def __init__(self) -> None:
        self.accum = 1
        # for a second pass; given up as soon as memory runs out
        self._retain_rows = True

    def fit(
        self,
        request: Request,
        replicas: int,
        plan: Callable[[int], Plan],
        compute: Callable[..., Outcome],
        release: Callable[[], None],
    ) -> Outcome:
        """The outcome with ``accum`` sub-steps, or with the fewest more that fit into
        memory.

        First runs the whole step with the number that fitted last. If memory runs out,
        doubles the number until a trial of two sub-steps fits, then bisects. The
        smallest number that fits is tried with a whole step.
        """
        largest = -(-max(request.sizes) // replicas)  # then a sub-step has one row
        # ``fits`` is 0 if none is known
        failed, fits, retries = self.accum - 1, self.accum, 0
        trial = replace(request, return_outputs=False)
        while True:
            number = (failed + fits + 1) // 2 if fits else min(2 * failed, largest)
            is_whole, cut = fits == failed + 1, plan(number)
            computes_twice = request.whole_batch and len(cut.substep_rows) > len(
                cut.shares
            )
            retain_rows = is_whole and self._retain_rows and computes_twice
            try:
                if is_whole:
                    outcome = compute(request, cut, retain_rows=retain_rows)
                    self._keep(number, outcome)
                    return replace(outcome, retries=retries)
                # Two sub-steps per replica have a whole step's peak of memory.
                compute(trial, cut, max_substeps=2, retain_rows=False).attempt.undo()
                fits = number
            except Exception as error:
                if is_out_of_memory(error) and not hasattr(
                    error, "more_substeps_cannot_help"
                ):
                    retries += 1
                    if retain_rows:
                        self._retain_rows = False
                    elif number >= largest:
                        error.add_note(
                            f'accum="auto" has nothing left to try: with {number} '
                            "sub-steps a "
                            f"sub-step is one row, and that does not fit ({retries} "
                            "tries ran out "
                            f"of memory)"
                        )
                        raise
                    else:
                        failed, fits = number, 0 if is_whole else fits
                elif is_whole:
                    raise
                else:
                    # the whole step will raise it, as for one row in a norm
                    fits = number
                clear_frames(error)
            release()

    def _keep(self, number: int, outcome: Outcome) -> None:
        start, self.accum = self.accum, number
        if number != start:
            with outcome.attempt:  # warnings may be errors
                warn(
                    f'accum="auto": {outcome.request.rows} rows with accum={start} '
                    "ran out of "
                    f"memory; accum={number} is the smallest that fits, and is kept"
                )
