"""One thread per replica, for as long as the engine lives, behind one door.

``parallel_apply`` has the name and argument order of torch's, but does not start a thread
per replica and call, and its threads carry the caller's whole context.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from scatterpar.devices import verbs
from scatterpar.threads.context import Context, uncached
from scatterpar.threads.interrupts import Interrupts
from scatterpar.threads.job import Call, Job
from scatterpar.threads.serving import Queue, serve, shut_down, wake
from scatterpar.torch_private import renew_engine

__all__ = ["Cancelled", "Workers", "note"]

_LOOK_SECONDS = 0.5  # how often the caller looks whether all workers are alive


class Cancelled(Exception):
    """Ends a replica's work at its next sub-step when another has failed; users never see it."""


def note(error: BaseException, text: str) -> None:
    """Add a note to a user's error, unless it has it already or will not have it."""
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


class Workers:
    """``count`` threads that run what ``parallel_apply`` gives them, one replica each.

    The threads start with the first parallel call, are daemons, and stop when the object is
    closed, collected, or the interpreter exits. Each computes with its part of the caller's
    intra-op threads.

    Args:
        count: the number of replicas.
        owner: what errors call the object that the workers work for.
    """

    def __init__(self, count: int, owner: str) -> None:
        self.count = count
        self._owner = owner
        self._lock = threading.Lock()
        self._posting = threading.RLock()  # who closes comes before all of a job, or after
        self._pid = os.getpid()
        self._closed = False
        self._failed = False  # the last job: then what its error held is to be let go of
        self._woken = wake([])  # at its end, to let go of what it held
        self.interrupts = Interrupts()
        self.abandoned = False
        self._queues: list[Queue] = []
        self._threads: list[threading.Thread] = []
        self._stop: weakref.finalize[..., Workers] | None = None

    def parallel_apply(
        self,
        modules: Sequence[Callable[..., Any]],
        inputs: Sequence[tuple[Any, ...]],
        kwargs_tup: Sequence[dict[str, Any]] | None = None,
        devices: Sequence[torch.device] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Any]:
        """Call ``modules[i](*inputs[i], **kwargs_tup[i])`` on ``devices[i]``, all at once.

        A single call runs in the caller's own thread. On the CPU as many start as there are
        cores, and each of the others when one ends: short calls that fight for cores and for
        the interpreter's lock cost several times as much. But since calls may wait for each
        other, all start soon in any case. Those that share an accelerator run in turn.

        When one fails, ``cancel`` is set, the others are waited for, and the error of the
        lowest replica is raised in the caller's thread, with the others noted on it. An
        interrupt does the same; a second interrupt stops the waiting and gives the threads up,
        which ``abandoned`` then tells.

        Args:
            modules: one callable per replica.
            inputs: its positional arguments.
            kwargs_tup: its keyword arguments.
            devices: the device to make current for it; the CPU by default.
            cancel: set as soon as one has failed or the caller is interrupted.

        Returns:
            The results in the order of ``modules``.
        """
        kwargs_tup = kwargs_tup or [{}] * len(modules)
        devices = devices or [torch.device("cpu")] * len(modules)
        verbs.keep_memory(devices[0])
        if len(modules) == 1:
            with verbs.on(devices[0], ()), uncached(), self.interrupts.allowed():
                return [modules[0](*inputs[0], **kwargs_tup[0])]
        context = Context()
        calls = [
            Call(module, args, kwargs, device, context)
            for module, args, kwargs, device in zip(
                modules, inputs, kwargs_tup, devices, strict=True
            )
        ]
        try:
            self._dispatch(calls, cancel or threading.Event())
            return [call.take() for call in calls]
        finally:
            del calls  # an error's traceback holds this frame, and a call holds its error

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Interrupts]:
        """One job at a time, interrupts deferred; refuses where there is nobody to do it.

        Raises:
            RuntimeError: inside another job, after ``close()``, or in a forked child.
        """
        self._refuse_if_closed()
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._owner} belongs to another process: threads do not survive a fork; "
                f"make another in the process that uses it"
            )
        with Interrupts() as interrupts:  # first: none may come between the lock and the try
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(
                    f"{self._owner} is in the middle of a step: another cannot start from "
                    f"inside a criterion or a hook, nor from a second thread"
                )
            try:
                self.interrupts = interrupts
                self._woken(_LOOK_SECONDS)
                if self._failed:
                    self._let_go()
                self._failed = True
                yield interrupts
                self._failed = False
            finally:
                self._woken = self._wake()
                self._lock.release()

    def release(self) -> None:
        """Inside a job, between its calls: give back memory that nobody uses any more."""
        self._let_go()
        verbs.release()

    def _let_go(self) -> None:
        """Wait until what the workers made, and others have dropped, is freed."""
        self._wake()(_LOOK_SECONDS)
        self._wake()(_LOOK_SECONDS)  # what one of them freed may have held what another made

    def _wake(self) -> Callable[[float], None]:
        """Let the workers, which are idle, free what others have dropped; to be waited for."""
        with self._posting:
            there = self._stop is not None and self._stop.alive and not self._closed
            return wake(self._queues if there else [])

    def close(self) -> None:
        """Stop the threads and wait for them; later jobs are refused."""
        with self._posting:
            self._closed = True
        if self._stop is not None:
            self._stop()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self._owner} is closed; make another to go on")

    def _dispatch(self, calls: list[Call], cancel: threading.Event) -> None:
        devices = [call.device for call in calls]
        job = Job(len(calls), verbs.at_once(devices), cancel)
        by_thread: dict[int, list[Call]] = {}
        with self._posting:
            self._refuse_if_closed()
            queues = self._started()
            for i, (call, device) in enumerate(zip(calls, devices, strict=True)):
                # Those on one accelerator draw from its one generator: in their order, so in turn.
                thread = i if device.type == "cpu" else devices.index(device)
                by_thread.setdefault(thread, []).append(call)
                queues[thread].put(partial(job.run, i, call))
        try:
            self._wait(job, by_thread)
            errors = [(i, call.error) for i, call in enumerate(calls) if call.error is not None]
        finally:
            for call in calls:
                call.error = None  # its traceback leads back to the call, and to activations
        errors = [(i, error) for i, error in errors if not isinstance(error, Cancelled)]
        try:
            for i, error in errors[1:]:
                if error is not errors[0][1] and _described(error) != _described(errors[0][1]):
                    note(errors[0][1], f"replica {i} failed too: {_described(error)}")
            if errors:
                raise errors[0][1]
        finally:
            del errors

    def _wait(self, job: Job, by_thread: dict[int, list[Call]]) -> None:
        interrupt: BaseException | None = None
        lost: list[str] = []
        while not job.done and not lost:
            try:
                with self.interrupts.allowed():
                    job.ended.acquire(timeout=_LOOK_SECONDS)
                lost = self._lost(job, by_thread)
            except BaseException as error:
                self.interrupts.defer()
                job.interrupted = True
                job.cancel.set()
                if interrupt is not None:
                    interrupt = None  # its traceback leads here
                    self._abandon()
                    raise
                interrupt = error
        if lost:
            self._abandon()
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt
        if lost:
            raise RuntimeError(
                f"{self._owner} lost a worker ({', '.join(lost)}): an exception was raised in its "
                f"thread from outside; nothing was changed, and the next step starts new workers"
            )

    def _lost(self, job: Job, by_thread: dict[int, list[Call]]) -> list[str]:
        """Threads that have died before they were through, once nobody else is at work.

        Nothing of ours ends them; an exception that is set from outside does.
        """
        busy = [i for i, calls in by_thread.items() if not all(call.ended for call in calls)]
        dead = [self._threads[i].name for i in busy if not self._threads[i].is_alive()]
        if dead:
            job.cancel.set()
        return dead if len(dead) == len(busy) and not job.done else []

    def _abandon(self) -> None:
        """Leave threads that are still at work to end by themselves; others follow them."""
        self.abandoned = True
        for queue in self._queues:
            queue.put(None)
        self._stop, self._queues = None, []

    def _started(self) -> list[Queue]:
        if self._stop is not None and self._stop.alive:
            if all(thread.is_alive() for thread in self._threads):
                return self._queues
            self._abandon()
        renew_engine()
        before = torch.get_num_threads()
        budget = max(1, before // self.count)
        self._queues = [SimpleQueue() for _ in range(self.count)]
        ready = threading.Barrier(self.count + 1)
        self._threads = threads = [
            threading.Thread(
                target=serve, args=(queue, budget, ready), daemon=True, name=f"scatterpar-{i}"
            )
            for i, queue in enumerate(self._queues)
        ]
        for thread in threads:
            contextvars.Context().run(thread.start)  # a worker would keep the caller's variables
        ready.wait()
        torch.set_num_threads(before)  # a worker's setting became the default of later threads
        self._stop = weakref.finalize(self, shut_down, self._queues, threads, os.getpid())
        return self._queues


def _described(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # a user's own __repr__
        return type(error).__name__
