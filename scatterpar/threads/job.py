"""What the threads of ``workers.py`` are given: the call of each replica, and whose turn it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from scatterpar.threads.context import Context

__all__ = ["Call", "Job"]

_HEAD_START_SECONDS = 0.01  # how long the first replicas have the cores to themselves


class Call:
    """One replica's part of a job, and what became of it.

    The caller goes on perhaps before the thread that ran it lets go of it: what it leads to is
    taken out of it by then.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        context: Context,
    ) -> None:
        self.device = device
        self._work = (module, args, kwargs)
        self._context = context
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        """Compute the result or the error; never raises."""
        context = self._context
        del self._context
        try:
            self.result = context.variables.copy().run(self._in_context, context)
        except BaseException as error:
            self.error = error

    def take(self) -> Any:
        """The result, which nobody else has then."""
        result, self.result = self.result, None
        return result

    def _in_context(self, context: Context) -> Any:
        module, args, kwargs = self._work
        del self._work
        with context.entered(self.device):
            return module(*args, **kwargs)


class Job:
    """The calls of all replicas: whose turn it is, and how many have not ended.

    Args:
        count: how many there are.
        at_once: how many start at once; each of the others starts when one ends, or soon.
        cancel: set as soon as one has failed.
    """

    def __init__(self, count: int, at_once: int, cancel: threading.Event) -> None:
        self.cancel = cancel
        self.interrupted = False  # who has not started yet need not
        self.done = False
        self.ended = threading.Lock()  # an Event's wait can be interrupted with its lock taken
        self.ended.acquire()
        self._at_once = at_once
        self._turns = threading.Semaphore(0)  # one for each call that has ended
        self._unfinished = count
        self._counting = threading.Lock()

    def run(self, number: int, call: Call) -> None:
        """Run ``call``, the one with this ``number``, when it is its turn."""
        if self._may_start(number):
            call.run()
        if call.error is not None:
            self.cancel.set()
        self._turns.release()
        with self._counting:
            call.ended = True
            self._unfinished -= 1
            if self._unfinished:
                return
        self.done = True
        self.ended.release()

    def _may_start(self, number: int) -> bool:
        """Wait for a turn, though not for long: calls may wait for each other. Whether to start."""
        if number >= self._at_once:
            self._turns.acquire(timeout=_HEAD_START_SECONDS)
            if self.cancel.is_set():
                return False
        return not self.interrupted
