"""accum="auto": recognise that memory ran out, and find the fewest sub-steps that fit."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from scatterpar.devices import verbs

__all__ = ["IN_VAIN", "is_out_of_memory", "smallest_that_fits"]

IN_VAIN = "more sub-steps do not help"  # in a note on an error: the search ends with it

_Result = TypeVar("_Result")

# What allocators and libraries say in a plain RuntimeError.
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
    """Whether ``error`` says that memory ran out, in any of the known forms.

    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def smallest_that_fits(
    start: int, most: int, attempt: Callable[[int], _Result], trial: Callable[[int], object]
) -> tuple[int, _Result, int]:
    """The fewest sub-steps, from ``start`` on, with which ``attempt`` does not run out of memory.

    Doubles until a trial fits, then bisects between the last that did not and the first
    that did. Trials are cheap, attempts are the whole thing.

    Args:
        start: the number that is attempted first, without a trial.
        most: with so many, a sub-step is down to one row.
        attempt: what is wanted, by the number of sub-steps.
        trial: takes as much memory as ``attempt``, for less work.

    Returns:
        The number, what ``attempt`` returned, and how many tries ran out of memory.
    """
    search = _Search(most, attempt, trial)
    number = start
    while not search.attempted(number):
        number = _fewest(search, number)
    return number, search.results[0], search.retries


def _fewest(search: _Search[_Result], failed: int) -> int:
    """The fewest sub-steps above ``failed`` whose trial fits."""
    fits = min(2 * failed, search.most)
    while not search.tried(fits):
        failed, fits = fits, min(2 * fits, search.most)
    while fits > failed + 1:
        middle = (failed + fits + 1) // 2
        if search.tried(middle):
            fits = middle
        else:
            failed = middle
    return fits


class _Search(Generic[_Result]):
    """Runs attempts and trials, and counts those that ran out of memory."""

    def __init__(
        self, most: int, attempt: Callable[[int], _Result], trial: Callable[[int], object]
    ) -> None:
        self.most = most
        self.results: list[_Result] = []
        self.retries = 0
        self._attempt = attempt
        self._trial = trial

    def attempted(self, number: int) -> bool:
        """Whether the whole thing had the memory it needs; its result is in ``results``."""
        return self._fits(lambda: self.results.append(self._attempt(number)), number)

    def tried(self, number: int) -> bool:
        """Whether a trial had the memory it needs.

        Sub-steps smaller than needed may fail for reasons of their own, as batch normalisation
        does with one row. That is not for the memory to say: an attempt will, where it comes to it.
        """
        try:
            fits = self._fits(lambda: self._trial(number), number)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            fits = True
        verbs.release()
        return fits

    def _fits(self, run: Callable[[], object], number: int) -> bool:
        try:
            run()
        except BaseException as error:
            notes = getattr(error, "__notes__", ())
            if not is_out_of_memory(error) or any(IN_VAIN in note for note in notes):
                raise
            self.retries += 1
            if number >= self.most:
                error.add_note(
                    f'accum="auto" has nothing left to try: with {number} sub-steps a sub-step is '
                    f"one row, and that does not fit ({self.retries} tries ran out of memory)"
                )
                raise
            traceback.clear_frames(error.__traceback__)
        else:
            return True
        verbs.release()
        return False
