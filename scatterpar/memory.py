"""accum="auto": recognise that memory ran out, and find the fewest sub-steps that fit."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from scatterpar import devices

__all__ = ["is_out_of_memory", "smallest_that_fits"]

_Result = TypeVar("_Result")

# What allocators and libraries say in a plain RuntimeError.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
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
    failed, fits, number, retries = 0, 0, start, 0
    while True:
        try:
            if not retries or fits == failed + 1:
                return number, attempt(number), retries
            trial(number)
            fits = number
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            retries += 1
            if number >= most:
                error.add_note(
                    f'accum="auto" has nothing left to try: with {number} sub-steps a sub-step is '
                    f"one row, and that does not fit ({retries} tries ran out of memory)"
                )
                raise
            traceback.clear_frames(error.__traceback__)
            failed, fits = number, fits if fits > number else 0
        devices.release()
        number = (failed + fits + 1) // 2 if fits > failed + 1 else fits or min(2 * failed, most)
