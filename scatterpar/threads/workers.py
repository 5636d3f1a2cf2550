"""One thread per replica, for as long as the engine lives, behind one door.

``parallel_apply`` has the name and argument order of torch's, but does not start a thread
per replica and call, and its threads carry the caller's whole context.

In a free-threaded interpreter (PEP 703) the thread that made an object frees it, when it next runs
Python; also where another thread dropped it last. So idle threads wake now and then, and whoever
needs the memory waits for that.
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
from dataclasses import dataclass
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
_EXIT_SECONDS = 4.0  # how long what is at work may take to end when all stop


def _serve(queue: _Queue, budget: int, ready: threading.Barrier) -> None:
    """Run the tasks of ``queue``, each with ``budget`` intra-op threads."""
    torch.get_num_threads()  # initialises the thread; its first parallel operator would undo ours
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


_HEAD_START_SECONDS = 0.01  # how long the first replicas have the cores to themselves


@dataclass
class _Call:
    """One replica's part of a job, and what became of it; what it leads to is taken out of it."""

    thread: int  # the number of the worker that runs it
    work: Callable[[], Any] | None
    result: Any = None
    error: BaseException | None = None
    ended: bool = False


class Job:
    """The calls of all replicas: whose turn it is, and whether all have ended.

    ``at_once`` of them start at once; each of the others when one ends, or soon. ``cancel`` is set
    as soon as one has failed.
    """

    def __init__(self, calls: Sequence[_Call], at_once: int, cancel: threading.Event) -> None:
        self.calls = calls
        self.cancel = cancel
        self.interrupted = False  # who has not started yet need not
        self.ended: SimpleQueue[None] = SimpleQueue()  # interrupts leave no lock of it taken
        self._at_once = at_once
        self._turns = threading.Semaphore(0)  # one for each call that has ended

    @property
    def busy(self) -> list[_Call]:
        """The calls that have not ended."""
        return [call for call in self.calls if not call.ended]

    def run(self, number: int) -> None:
        """Run the call with this ``number``, when it is its turn; never raises."""
        call = self.calls[number]
        work, call.work = call.work, None
        if work is not None and self._may_start(number):
            try:
                call.result = work()
            except BaseException as error:
                call.error = error
                self.cancel.set()
        del work
        self._turns.release()
        call.ended = True
        if not self.busy:
            self.ended.put(None)

    def _may_start(self, number: int) -> bool:
        """Wait for a turn, though not for long: calls may wait for each other. Whether to start."""
        if number >= self._at_once:
            self._turns.acquire(timeout=_HEAD_START_SECONDS)
            if self.cancel.is_set():
                return False
        return not self.interrupted


_LOOK_SECONDS = 0.5  # how often the caller looks whether all workers are alive


class Cancelled(Exception):
    """Ends a replica's work at its next sub-step when another has failed; users never see it."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note to a user's error, unless it has it already or will not have it."""
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


class Workers:
    """One thread per replica, named after its device in ``devices``; runs ``parallel_apply``.

    The threads start with the first parallel call, are daemons, and stop when the object is
    closed, collected, or the interpreter exits. Each computes with its part of the caller's
    intra-op threads. Errors call the object that they work for ``owner``.

    When the interpreter exits, jobs of daemon threads are waited for, and these threads stop at the
    door: until 3.14 it aborts where such a thread comes back from C++ too late, as it does, too,
    from letting go of a tensor.
    """

    exit_by: ClassVar[float] = math.inf  # on the monotonic clock
    _living: ClassVar[set[weakref.ref[Workers]]] = set()  # no WeakSet: one is copied in Python

    def __init__(self, devices: Sequence[torch.device | None], owner: str) -> None:
        self.count = len(devices)
        self._names = [f"scatterpar replica {i}" for i in range(self.count)]
        for i, device in enumerate(devices):
            self._names[i] += "" if device is None else f", {device}"
        self._owner = owner
        self._lock = threading.Lock()
        self._posting = threading.RLock()  # who closes comes before all of a job, or after
        self._pid = os.getpid()
        self._closed = False
        self._failed = False  # the last job: then what its error held is to be let go of
        self.interrupts = Interrupts()
        self.claims = Claims()
        self.abandoned = False
        self._queues: list[_Queue] = []
        self._threads: list[threading.Thread] = []
        self._stop: weakref.finalize[..., Workers] | None = None
        self._living.add(weakref.ref(self, self._living.discard))

    @classmethod
    def exit(cls) -> None:
        """Let what is at work end, and nothing else begin but in the main thread."""
        cls.exit_by = time.monotonic() + _EXIT_SECONDS
        for reference in list(cls._living):  # while others make engines and drop them
            workers, patience = reference(), max(0.0, cls.exit_by - time.monotonic())
            if workers is None or workers._pid != os.getpid():
                continue
            if workers._lock.acquire(timeout=patience):
                workers._lock.release()

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
        """
        kwargs_tup = kwargs_tup or [{}] * len(modules)
        devices = devices or [torch.device("cpu")] * len(modules)
        runtime.tune_malloc(devices[0])
        if len(modules) == 1:
            with runtime.use_device(devices[0], ()), no_autocast_cache(), self.interrupts.allowed():
                return [modules[0](*inputs[0], **kwargs_tup[0])]
        context = CallerContext()
        calls = []
        given = zip(modules, inputs, kwargs_tup, devices, strict=True)
        for i, (module, args, kwargs, device) in enumerate(given):
            # Those on one accelerator draw from its one generator: in their order, so in turn.
            thread = devices.index(device) if runtime.is_async(device) else i
            work = partial(context.run, device, partial(module, *args, **kwargs))
            calls.append(_Call(thread, work))
        return self._dispatch(
            Job(calls, runtime.max_concurrency(devices), cancel or threading.Event())
        )

    @contextlib.contextmanager
    def exclusive(self, *things: object) -> Iterator[None]:
        """One job at a time, with these ``things`` for itself, and interrupts deferred.

        Refuses where there is nobody to do it, or another has one of them.
        """
        self._refuse_if_closed()
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._owner} belongs to another process: threads do not survive a fork; "
                f"make another in the process that uses it"
            )
        with Interrupts() as interrupts:  # first: none may come between the lock and the try
            held = self._lock.acquire(blocking=False)
            if self._is_exiting():  # then who exits may hold it
                if held:
                    self._lock.release()
                time.sleep(_EXIT_SECONDS)  # to be ended with the interpreter
                raise RuntimeError(f"{self._owner} begins no step while the interpreter exits")
            if not held:
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
        """Whether this thread is to be ended with the interpreter."""
        is_main = threading.current_thread() is threading.main_thread()
        return self.exit_by < math.inf and not is_main

    def release(self) -> None:
        """Inside a job, between its calls: give back memory that nobody uses any more."""
        self._await_deferred_frees()
        runtime.empty_cache()

    def _await_deferred_frees(self) -> None:
        """Wait until idle workers have freed what they made, and others have dropped."""
        if _FREE_THREADED:
            time.sleep(3 * _IDLE_SECONDS)  # what one of them frees may hold what another made

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
        calls = job.calls
        with self._posting:
            self._refuse_if_closed()
            queues = self._started()
            for i, call in enumerate(calls):
                queues[call.thread].put(partial(job.run, i))
        try:
            self._wait(job)
            results = [call.result for call in calls]
            errors = [(i, call.error) for i, call in enumerate(calls) if call.error is not None]
        finally:
            for call in calls:
                call.result = call.error = None  # a traceback leads here, and to activations
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
        interrupt: BaseException | None = None
        lost: list[str] = []
        while job.busy and not lost:
            try:
                with self.interrupts.allowed(), contextlib.suppress(Empty):
                    job.ended.get(timeout=_LOOK_SECONDS)
                lost = self._lost(job)
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

    def _lost(self, job: Job) -> list[str]:
        """Threads that have died before they were through, once nobody else is at work.

        Nothing of ours ends them; an exception that is set from outside does.
        """
        busy = {call.thread for call in job.busy}
        dead = [self._threads[i].name for i in busy if not self._threads[i].is_alive()]
        if dead:
            job.cancel.set()
        return dead if len(dead) == len(busy) and job.busy else []

    def _abandon(self) -> None:
        """Leave threads that are still at work to end by themselves; others follow them."""
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
            for thread in threads:  # in a new context, since a thread would keep the caller's
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
