"""accum="auto": the fewest sub-steps that fit into memory, from the number of the last step on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from scatterpar.plan import Plan
from scatterpar.report import warn
from scatterpar.step.outcome import Outcome
from scatterpar.step.request import Request

# In a note on an error, this ends the search.
MORE_SUBSTEPS_CANNOT_HELP = "more sub-steps do not help"

# Texts of allocators and libraries in a plain RuntimeError.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # its workspace did not fit
    "unable to find an engine to execute this computation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a known form of "out of memory".

    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


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
        compute: Callable[[Request, Plan], Outcome],
        release: Callable[[], None],
    ) -> Outcome:
        """The outcome with ``accum`` sub-steps, or with the fewest more that fit into memory.

        First runs the whole step with the number that fitted last. If memory runs out, doubles the
        number until a trial of two sub-steps fits, then bisects.
        """
        max_accum = -(-max(request.sizes) // replicas)  # with so many, a sub-step has one row
        start, retries = self.accum, 0
        failed = start - 1  # no number up to this is tried
        fits = start  # tried first, then the smallest that a trial fitted with; 0: none
        while True:
            is_whole = fits == failed + 1
            number = (failed + fits + 1) // 2 if fits else min(2 * failed, max_accum)
            cut = plan(number)
            has_two_passes = request.whole_batch and any(
                len(share.micro_batches) > 1 for share in cut.shares
            )
            retain_rows = is_whole and self._retain_rows and has_two_passes
            try:
                if is_whole:
                    outcome = compute(replace(request, retain_rows=retain_rows), cut)
                    break
                compute(request.as_trial(), cut).attempt.undo()
                fits = number
            except Exception as error:
                if not is_out_of_memory(error):
                    if is_whole:
                        raise
                    # Not memory: the whole step will raise it, for example for one row in batch
                    # normalisation.
                    fits = number
                else:
                    retries += 1
                    notes = "\n".join(getattr(error, "__notes__", ()))
                    if MORE_SUBSTEPS_CANNOT_HELP in notes:
                        raise
                    if retain_rows:
                        self._retain_rows = False
                    elif number >= max_accum:
                        error.add_note(
                            f'accum="auto" has nothing left to try: with {number} sub-steps a '
                            f"sub-step is one row, and that does not fit ({retries} tries ran "
                            f"out of memory)"
                        )
                        raise
                    else:
                        failed, fits = number, 0 if is_whole else fits
                traceback.clear_frames(error.__traceback__)
            release()
        self.accum = number
        if number != start:
            with outcome.attempt:  # warnings may be errors
                warn(
                    f'accum="auto": {request.rows} rows with accum={start} ran out of memory; '
                    f"accum={number} is the smallest that fits, and is kept"
                )
        return replace(outcome, retries=retries)
