"""Whether something is gone: at once, or as soon as a free-threaded interpreter frees it."""

from __future__ import annotations

import gc
import sysconfig
import time
from collections.abc import Callable

import torch

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_SECONDS = 10.0 if FREE_THREADED else 0.0


def in_time(gone: Callable[[], bool]) -> bool:
    """Whether ``gone()`` holds at once.

    In a free-threaded interpreter: before long, since there an object that another thread drops
    is freed when the thread that made it runs Python again.
    """
    deadline = time.monotonic() + _SECONDS
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone()


def count_tensors() -> int:
    """How many tensors the interpreter knows of."""
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
