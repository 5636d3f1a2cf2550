"""What is the user's, and shared by replicas, engines and threads: whose is it just now?"""

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

_CAN_TELL = hasattr(time, "pthread_getcpuclockid")  # whether a thread computes
_PATIENCE_SECONDS = 1.0 if _CAN_TELL else 10.0  # how long to watch a replica that does not compute
_LAUNCH_SECONDS = 0.002  # likewise, one that does not get on with its Python
_UNTIMED = contextlib.nullcontext()
_LOOKING = threading.Lock()  # of all engines: whoever looks has switched collection off


class ProgressLock:
    """One replica at a time is in the body, in the order in which they come.

    The next one waits as long as the one whose turn it is gets on: while ``watch(thread)()``
    changes within so many ``seconds``. One that waits for something itself lets others go beside.
    """

    def __init__(self, watch: Callable[[int], Callable[[], Hashable]], seconds: float) -> None:
        self._watch, self._seconds = watch, seconds
        self._lock = threading.Lock()
        self._next = threading.Lock()  # of the one who watches; the others queue for it
        self._whose: Callable[[], Hashable] = watch(threading.get_ident())
        self._seen: object = None

    @contextlib.contextmanager
    def held(self, waiting: contextlib.AbstractContextManager[Any] = _UNTIMED) -> Iterator[None]:
        """Hold the lock in the body, or run beside a body that makes no progress.

        The wait for the lock is inside ``waiting``.
        """
        with waiting, self._next:
            mine = self._lock.acquire(blocking=False) or self._wait()
            if mine:
                self._whose = self._watch(threading.get_ident())
        try:
            yield
        finally:
            if mine:
                self._lock.release()

    def _wait(self) -> bool:
        """Whether the turn came, or whoever has it does nothing."""
        while True:
            before, self._seen = self._seen, (self._whose, self._whose())
            if self._seen == before:
                return False
            if self._lock.acquire(timeout=self._seconds):
                return True


def make_criterion_lock() -> ProgressLock:
    """A criterion is called by one replica at a time: what it leaves behind is read by who did.

    One that waits for the other replicas lets them go beside it.
    """
    return ProgressLock(_clock_of, _PATIENCE_SECONDS)


def _clock_of(thread: int) -> Callable[[], float]:
    """The seconds that a thread has computed; stands still where the system does not tell."""
    if not _CAN_TELL:
        return functools.partial(float)
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(thread))


def stack_of(thread: int) -> Callable[[], Hashable]:
    """Where in its Python a thread is; stands still in what it calls, and while it waits.

    Nothing is collected meanwhile: CPython 3.11 may do so while it makes a frame's object, and a
    finalizer that waits lets the thread leave that frame (cpython issue 106883).
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
    """A lock for the Python of forward passes. A holder that waits in Python lets others enter."""
    return ProgressLock(stack_of, _LAUNCH_SECONDS)


class Claims:
    """What one step has for itself until it is over: a module, and leaves that get gradients.

    Two engines may have one module, and two threads a step of each. What both wrote to ``.grad``
    would be mixed.
    """

    _taken: ClassVar[dict[tuple[int, int], Claims]] = {}  # by process: a fork copies them

    def __init__(self) -> None:
        self._things: dict[tuple[int, int], object] = {}

    def release(self) -> None:
        """The step is over."""
        while self._things:
            self._taken.pop(self._things.popitem()[0])

    def take(self, *things: object) -> None:
        """Claim what is not this step's already."""
        process = os.getpid()
        for thing in things:
            key = process, id(thing)
            if self._taken.setdefault(key, self) is self:  # no other thread can come between
                self._things[key] = thing
                continue
            shape = f" of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else ""
            raise RuntimeError(
                f"another engine is in the middle of a step that trains this "
                f"{type(thing).__name__}{shape}, and two steps at once would mix their gradients: "
                f"take one after the other, or give each thread a copy of the module"
            )
