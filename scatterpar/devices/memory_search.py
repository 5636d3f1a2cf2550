"""accum="auto": recognise that memory ran out, and find the fewest sub-steps that fit."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["IN_VAIN", "MemorySearch", "is_in_vain", "is_out_of_memory"]

IN_VAIN = "more sub-steps do not help"  # in a note on an error, this ends the search

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


def is_in_vain(error: BaseException) -> bool:
    """Whether a note on ``error`` says that nothing helps."""
    return any(IN_VAIN in note for note in getattr(error, "__notes__", ()))


class MemorySearch(Generic[_Result]):
    """Finds the fewest sub-steps with which ``attempt`` does not run out of memory.

    Doubles until a trial fits, then bisects between the last that did not and the first
    that did. Trials are cheap, attempts are the whole thing.

    Args:
        most: with so many, a sub-step is down to one row.
        attempt: what is wanted, by the number of sub-steps.
        trial: takes as much memory as ``attempt``, for less work.
        release: gives back memory that nobody uses any more.

    Attributes:
        retries: how many tries ran out of memory.
    """

    def __init__(
        self,
        most: int,
        attempt: Callable[[int], _Result],
        trial: Callable[[int], object],
        release: Callable[[], None],
    ) -> None:
        self.retries = 0
        self._most = most
        self._attempt = attempt
        self._trial = trial
        self._release = release
        self._results: list[_Result] = []

    def smallest(self, start: int) -> tuple[int, _Result]:
        """That number, ``start`` at least, and what ``attempt`` returned.

        ``start`` is attempted first, without a trial.
        """
        number = start
        while not self._attempted(number):
            number = self._fewest(number)
        return number, self._results[0]

    def _fewest(self, failed: int) -> int:
        """The fewest sub-steps above ``failed`` whose trial fits."""
        fits = min(2 * failed, self._most)
        while not self._tried(fits):
            failed, fits = fits, min(2 * fits, self._most)
        while fits > failed + 1:
            middle = (failed + fits + 1) // 2
            if self._tried(middle):
                fits = middle
            else:
                failed = middle
        return fits

    def _attempted(self, number: int) -> bool:
        """Whether the whole thing had the memory it needs; its result is in ``_results``."""
        return self._fits(lambda: self._results.append(self._attempt(number)), number)

    def _tried(self, number: int) -> bool:
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
        self._release()
        return fits

    def _fits(self, run: Callable[[], object], number: int) -> bool:
        try:
            run()
        except BaseException as error:
            if not is_out_of_memory(error) or is_in_vain(error):
                raise
            self.retries += 1
            if number >= self._most:
                error.add_note(
                    f'accum="auto" has nothing left to try: with {number} sub-steps a sub-step is '
                    f"one row, and that does not fit ({self.retries} tries ran out of memory)"
                )
                raise
            traceback.clear_frames(error.__traceback__)
        else:
            return True
        self._release()
        return False
