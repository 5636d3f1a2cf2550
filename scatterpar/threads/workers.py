"""One worker thread per replica, alive as long as its ``Workers``; one job at a time.

Unlike torch's function of this name, ``parallel_apply`` uses the same threads in every call. They
enter the caller's ``CallerContext``.

In a free-threaded interpreter (PEP 703) an object is freed by the thread that created it, when that
thread next runs Python, even if another thread dropped the last reference. So idle threads wake
regularly, and code that needs the memory waits for them.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import math
import os
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import torch

from scatterpar import torch_private
from scatterpar.devices import runtime
from scatterpar.threads.caller_context import CallerContext, Interrupts, no_autocast_cache
from scatterpar.threads.locks import Claims

_Task = Callable[[], object]
_Queue = SimpleQueue[_Task | None]

_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_IDLE_SECONDS = 0.1
_EXIT_SECONDS = 4.0  # time for running jobs to end when the interpreter exits


def _serve(queue: _Queue, budget: int, ready: threading.Barrier) -> None:
    """Run the tasks of ``queue`` with ``budget`` intra-op threads."""
    torch.get_num_threads()  # initialises the thread, or its first operator would reset the number
    torch.set_num_threads(budget)
    ready.wait()
    del ready
    while True:
        try:
            task = queue.get(timeout=_IDLE_SECONDS if _FREE_THREADED else None)
        except Empty:
            continue
        if task is None:
            return
        task()
        del task


def _shut_down(queues: Sequence[_Queue], threads: Sequence[threading.Thread], pid: int) -> None:
    """End the threads of ``queues`` and wait for them, if they are this process's."""
    if os.getpid() != pid:  # a forked child has none of these threads
        return
    for queue in queues:
        queue.put(None)
    deadline = min(time.monotonic() + _EXIT_SECONDS, Workers.exit_by)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


_HEAD_START_SECONDS = 0.01  # the first replicas have the cores alone for this time


class Job:
    """One call per replica. A call is a function without arguments.

    Call ``i`` runs in the worker ``threads[i]``. The first ``at_once`` calls start immediately.
    Each other call starts when one ends, or after 10 ms. ``cancel`` is set when one has failed.

    Calls, results and errors are dropped after use: a traceback may refer to the job, and would
    keep activations alive.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[], Any]],
        threads: Sequence[int],
        at_once: int,
        cancel: threading.Event,
    ) -> None:
        self.calls = dict(enumerate(calls))  # those that have not started
        self.busy = set(self.calls)  # the numbers of those that have not ended
        self.threads = threads
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.cancel = cancel
        self.interrupted = False  # if true, calls that have not started yet do not start
        self.ended: SimpleQueue[None] = SimpleQueue()  # safe against interrupts: holds no lock
        self._at_once = at_once
        self._ended_calls = threading.Semaphore(0)  # each lets one call start

    def run(self, number: int) -> None:
        """Run the call with this ``number`` when it may start; never raises."""
        call = self.calls.pop(number)
        if self._may_start(number):
            try:
                self.results[number] = call()
            except BaseException as error:
                self.fail(number, error)
        del call
        self._ended_calls.release()
        self.busy.discard(number)
        if not self.busy:
            self.ended.put(None)

    def fail(self, number: int, error: BaseException) -> None:
        """Record the error of a call, and cancel the others."""
        self.errors[number] = error
        self.cancel.set()

    def _may_start(self, number: int) -> bool:
        """Wait at most 10 ms until another call ends. Returns ``False`` if this must not start."""
        if number >= self._at_once:
            self._ended_calls.acquire(timeout=_HEAD_START_SECONDS)
            if self.cancel.is_set():
                return False
        return not self.interrupted


_LOOK_SECONDS = 0.5  # between checks whether all workers are alive


class Cancelled(Exception):
    """Ends a replica's work at its next sub-step after another has failed; users never see it."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note to a user's error, unless it has this note already or refuses notes."""
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


class Workers:
    """One thread per replica, named after its device in ``devices``; runs ``parallel_apply``.

    The threads start with the first parallel call, are daemons, and stop when the object is closed
    or collected, or the interpreter exits. Each computes with its part of the caller's intra-op
    threads. ``owner`` is the name in error messages.

    When the interpreter exits, jobs that daemon threads of the user started get four seconds. The
    calling threads then sleep: until Python 3.14 the interpreter aborts if such a thread returns
    from C++, or frees a tensor, too late.
    """

    exit_by: ClassVar[float] = math.inf  # on the monotonic clock
    _living: ClassVar[set[weakref.ref[Workers]]] = set()  # a WeakSet is copied in Python code

    def __init__(self, devices: Sequence[torch.device | None], owner: str) -> None:
        self.count = len(devices)
        self._names = [f"scatterpar replica {i}" for i in range(self.count)]
        for i, device in enumerate(devices):
            self._names[i] += "" if device is None else f", {device}"
        self._owner = owner
        self._lock = threading.Lock()
        self._posting = threading.RLock()  # close() runs before or after all calls are queued
        self._pid = os.getpid()
        self._closed = False
        self._failed = False  # whether the last job failed; then its error's objects must be freed
        self.interrupts = Interrupts()
        self.claims = Claims()
        self.abandoned = False
        self._queues: list[_Queue] = []
        self._threads: list[threading.Thread] = []
        self._stop: weakref.finalize[..., Workers] | None = None
        self._living.add(weakref.ref(self, self._living.discard))

    @classmethod
    def exit(cls) -> None:
        """Let only the main thread start jobs from now on; wait four seconds for running ones."""
        cls.exit_by = time.monotonic() + _EXIT_SECONDS
        for reference in list(cls._living):  # other threads may add and remove engines
            workers, patience = reference(), max(0.0, cls.exit_by - time.monotonic())
            if workers is None or workers._pid != os.getpid():
                continue
            if workers._lock.acquire(timeout=patience):
                workers._lock.release()

    def parallel_apply(
        self,
        modules: Sequence[Callable[..., Any]],
        inputs: Sequence[tuple[Any, ...]],
        devices: Sequence[torch.device],
        cancel: threading.Event | None = None,
    ) -> list[Any]:
        """Call ``modules[i](*inputs[i])`` on ``devices[i]``, in parallel.

        A single call runs in the caller's thread. On the CPU as many calls start as there are
        cores, and each of the others when one ends: short calls that compete for cores and for the
        GIL cost several times as much. But calls may wait for each other, so all start soon in any
        case. Calls on the same accelerator run one after the other.

        If a call fails, ``cancel`` is set, the others are waited for, and the error of the lowest
        replica is raised in the caller's thread, with the others in its notes. An interrupt also
        sets ``cancel``, and is raised when the calls have ended. A second interrupt stops waiting
        and abandons the threads; ``abandoned`` is then true.
        """
        runtime.tune_malloc(devices[0])
        if len(modules) == 1:
            with runtime.use_device(devices[0], ()), no_autocast_cache(), self.interrupts.allowed():
                return [modules[0](*inputs[0])]
        context = CallerContext()
        calls = [
            partial(context.run, device, partial(module, *args))
            for module, args, device in zip(modules, inputs, devices, strict=True)
        ]
        # Calls on one accelerator draw from its one generator, so they run in order.
        threads = [devices.index(d) if runtime.is_async(d) else i for i, d in enumerate(devices)]
        at_once = runtime.max_concurrency(devices)
        return self._dispatch(Job(calls, threads, at_once, cancel or threading.Event()))

    @contextlib.contextmanager
    def exclusive(self, *things: object) -> Iterator[None]:
        """In the body, this thread owns the workers and claims ``things``. Interrupts are deferred.

        Raises ``RuntimeError`` if the workers are closed, busy or another process's, or if another
        job claims one of the things.
        """
        self._refuse_if_closed()
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._owner} belongs to another process: threads do not survive a fork; "
                f"make another in the process that uses it"
            )
        with Interrupts() as interrupts:  # first: no interrupt between the lock and the try
            is_held = self._lock.acquire(blocking=False)
            if self._is_exiting():  # the exiting thread may hold the lock
                if is_held:
                    self._lock.release()
                time.sleep(_EXIT_SECONDS)  # ends with the interpreter
                raise RuntimeError(f"{self._owner} begins no step while the interpreter exits")
            if not is_held:
                raise RuntimeError(
                    f"{self._owner} is in the middle of a step: another cannot start from "
                    f"inside a criterion or a hook, nor from a second thread"
                )
            try:
                self.interrupts = interrupts
                if self._failed:
                    self._await_deferred_frees()
                self._failed = True
                self.claims.take(*things)
                yield
                self._failed = False
            finally:
                self.claims.release()
                self._lock.release()
                if self._is_exiting():
                    time.sleep(_EXIT_SECONDS)

    def _is_exiting(self) -> bool:
        """Whether the interpreter exits and this thread is not the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        return self.exit_by < math.inf and not is_main

    def release(self) -> None:
        """Free cached memory; call it in the body of ``exclusive``, outside ``parallel_apply``."""
        self._await_deferred_frees()
        runtime.empty_cache()

    def _await_deferred_frees(self) -> None:
        """In free-threaded Python, wait until idle workers have freed the objects they created."""
        if _FREE_THREADED:
            time.sleep(3 * _IDLE_SECONDS)  # freed objects may refer to those of another worker

    def close(self) -> None:
        """Stop the threads and wait for them; later jobs are refused."""
        with self._posting:
            self._closed = True
        if self._stop is not None:
            self._stop()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self._owner} is closed; make another to go on")

    def _dispatch(self, job: Job) -> list[Any]:
        with self._posting:
            self._refuse_if_closed()
            queues = self._started()
            for number, thread in enumerate(job.threads):
                queues[thread].put(partial(job.run, number))
        try:
            self._wait(job)
            results = [job.results.get(number) for number in range(len(job.threads))]
            errors = [(i, job.errors[i]) for i in sorted(job.errors)]
        finally:
            job.results, job.errors = {}, {}  # a traceback refers to this frame
        errors = [(i, error) for i, error in errors if not isinstance(error, Cancelled)]
        try:
            for i, error in errors[1:]:
                if error is not errors[0][1] and _described(error) != _described(errors[0][1]):
                    add_note(errors[0][1], f"replica {i} failed too: {_described(error)}")
            if errors:
                raise errors[0][1]
            return results
        finally:
            del errors, results

    def _wait(self, job: Job) -> None:
        """Wait until all calls have ended. Raises the first interrupt afterwards."""
        interrupt: BaseException | None = None
        while job.busy:
            try:
                with self.interrupts.allowed(), contextlib.suppress(Empty):
                    job.ended.get(timeout=_LOOK_SECONDS)
                self._find_lost(job)
            except BaseException as error:
                self.interrupts.defer()
                job.interrupted = True
                job.cancel.set()
                if interrupt is not None:
                    interrupt = None  # its traceback refers to this frame
                    self._abandon()
                    raise
                interrupt = error
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt

    def _find_lost(self, job: Job) -> None:
        """Fail the calls of dead threads: an exception set from outside has ended these."""
        for number in list(job.busy):
            thread = self._threads[job.threads[number]]
            if not thread.is_alive() and number in job.busy:
                text = (
                    f"{self._owner} lost a worker ({thread.name}): an exception was raised in its "
                    f"thread from outside; nothing was changed, and the next step starts new "
                    f"workers"
                )
                job.fail(number, RuntimeError(text))
                job.busy.discard(number)

    def _abandon(self) -> None:
        """Let threads that still work end by themselves; the next job starts new ones."""
        self.abandoned = True
        for queue in self._queues:
            queue.put(None)
        self._stop, self._queues = None, []

    def _started(self) -> list[_Queue]:
        if self._stop is not None and self._stop.alive:
            if all(thread.is_alive() for thread in self._threads):
                return self._queues
            self._abandon()
        torch_private.renew_engine()
        before = torch.get_num_threads()
        budget = max(1, before // self.count)
        self._queues = [SimpleQueue() for _ in range(self.count)]
        ready = threading.Barrier(self.count + 1)
        self._threads = threads = [
            threading.Thread(target=_serve, args=(queue, budget, ready), daemon=True, name=name)
            for queue, name in zip(self._queues, self._names, strict=True)
        ]
        try:
            for thread in threads:  # a new context: a thread would keep the caller's alive
                contextvars.Context().run(thread.start)
        except RuntimeError as error:
            if "shutdown" in str(error):  # in Python 3.12
                raise RuntimeError(
                    f"{self._owner} has no threads yet, and Python starts none while the "
                    f"interpreter exits; take the first step before that"
                ) from error
            raise
        ready.wait()
        torch.set_num_threads(before)  # a worker's setting became the default of later threads
        self._stop = weakref.finalize(self, _shut_down, self._queues, threads, os.getpid())
        return self._queues


atexit.register(Workers.exit)


def _described(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # a user's own __repr__
        return type(error).__name__
