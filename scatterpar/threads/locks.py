"""Locks and claims on objects that replicas, engines and threads share: modules and leaves."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

from torch import Tensor

_HAS_CPU_CLOCK = hasattr(time, "pthread_getcpuclockid")  # one per thread
_PATIENCE_SECONDS = 1.0 if _HAS_CPU_CLOCK else 10.0  # to wait for a replica without progress
_LAUNCH_SECONDS = 0.002  # how long a forward pass may stay on one bytecode
_UNTIMED = contextlib.nullcontext()
_LOOKING = threading.Lock()  # of all engines; its holder has switched garbage collection off


class ProgressLock:
    """A lock that other threads pass while its holder makes no progress.

    The next thread waits while the holder makes progress, that is, while ``watch(thread)()``
    changes within ``seconds``. If the holder stalls, for example because it waits for another
    replica, the next thread enters as well.
    """

    def __init__(self, watch: Callable[[int], Callable[[], Hashable]], seconds: float) -> None:
        self._watch, self._seconds = watch, seconds
        self._lock = threading.Lock()
        self._next = threading.Lock()  # its holder watches progress; the others queue for it
        self._progress: Callable[[], Hashable] = watch(threading.get_ident())  # of the holder
        self._seen: object = None

    @contextlib.contextmanager
    def held(self, waiting: contextlib.AbstractContextManager[Any] = _UNTIMED) -> Iterator[None]:
        """Hold the lock in the body, or run together with a holder that makes no progress.

        The wait for the lock is inside ``waiting``.
        """
        with waiting, self._next:
            is_mine = self._lock.acquire(blocking=False) or self._wait()
            if is_mine:
                self._progress = self._watch(threading.get_ident())
        try:
            yield
        finally:
            if is_mine:
                self._lock.release()

    def _wait(self) -> bool:
        """Wait for the lock. Returns ``False`` if the holder makes no progress."""
        while True:
            before, self._seen = self._seen, (self._progress, self._progress())
            if self._seen == before:
                return False
            if self._lock.acquire(timeout=self._seconds):
                return True


def make_criterion_lock() -> ProgressLock:
    """A lock for calls of the criterion, which may share state; others enter if a call waits."""
    return ProgressLock(_clock_of, _PATIENCE_SECONDS)


def _clock_of(thread: int) -> Callable[[], float]:
    """A function that returns the CPU seconds of a thread; always zero if there is no clock."""
    if not _HAS_CPU_CLOCK:
        return functools.partial(float)
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(thread))


def stack_of(thread: int) -> Callable[[], Hashable]:
    """A function that returns a thread's stack: equal while the thread waits or runs C code.

    Garbage collection is off while the function runs: CPython 3.11 may collect while it makes a
    frame object, and a finalizer that waits lets the thread leave that frame (cpython issue
    106883).
    """

    def look() -> Hashable:
        places: list[tuple[object, int]] = []
        with _LOOKING:
            collects = gc.isenabled()
            gc.disable()
            try:
                frame = sys._current_frames().get(thread)
                while frame is not None:
                    places.append((frame.f_code, frame.f_lasti))
                    frame = frame.f_back
            finally:
                if collects:
                    gc.enable()
        return tuple(places)

    return look


def make_launch_lock() -> ProgressLock:
    """A lock for the Python of forward passes; others enter if its holder is stuck for 2 ms."""
    return ProgressLock(stack_of, _LAUNCH_SECONDS)


class Claims:
    """Exclusive claims of one step until it ends: on a module, and on leaves that get gradients.

    Two engines may have the same module, and two threads may run a step of each. Gradients that
    both add to ``.grad`` would be mixed.
    """

    _taken: ClassVar[dict[tuple[int, int], Claims]] = {}  # by process: a fork copies them

    def __init__(self) -> None:
        self._things: dict[tuple[int, int], object] = {}

    def release(self) -> None:
        """Release all claims."""
        while self._things:
            self._taken.pop(self._things.popitem()[0])

    def take(self, *things: object) -> None:
        """Claim the things. Raises ``RuntimeError`` if another step has claimed one of them."""
        process = os.getpid()
        for thing in things:
            key = process, id(thing)
            if self._taken.setdefault(key, self) is self:  # atomic
                self._things[key] = thing
                continue
            shape = f" of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else ""
            raise RuntimeError(
                f"another engine is in the middle of a step that trains this "
                f"{type(thing).__name__}{shape}, and two steps at once would mix their gradients: "
                f"take one after the other, or give each thread a copy of the module"
            )
