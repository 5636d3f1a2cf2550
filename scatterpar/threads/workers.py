"""One worker thread per replica, alive as long as its ``Workers``; one job at a time.

In a free-threaded interpreter (PEP 703) an object is freed by the thread that created
it, when that thread next runs Python. So idle threads wake regularly, and code that
needs the memory waits.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import torch
from torch import nn

from scatterpar.devices import memory, streams
from scatterpar.devices.virtual_devices import physical
from scatterpar.errors import Refusal, add_note, leave_out_own_frames
from scatterpar.libraries import is_library_file
from scatterpar.threads.caller_context import (
    CallerContext,
    no_autocast_cache,
    warn_of_what_replicas_lack,
)
from scatterpar.threads.interrupts import Interrupts
from scatterpar.threads.process_settings import SETTINGS_KEPT
from scatterpar.torch_private.modules import parametrized_in_threads
from scatterpar.torch_private.random_key import HAS_RANDOM_KEY
from scatterpar.torch_private.settings import frames_of_threads
from scatterpar.torch_private.thread_modes import is_transformed

_Queue = SimpleQueue[Callable[[], object] | None]

_HEAD_START_SECONDS = 0.01  # the first replicas have the cores alone for this time
_LOOK_SECONDS = 0.5  # on Windows no signal interrupts a longer wait
_CALLER = -1  # the number of an error that was raised in the caller's thread
_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_IDLE_SECONDS = 0.1
_HANG_SECONDS = 3.0  # after an interrupt; a sub-step seldom takes longer
_EXIT_SECONDS = 4.0  # time for running calls to end when the workers stop


class Overdue(Exception):
    """Calls have not ended within the limit; their threads are abandoned."""


class Cancelled(Exception):
    """Ends a replica's work at its next sub-step after another has failed.

    Users never see it.
    """


class Cancellation(threading.Event):
    """Set when a call of a job has failed, or the caller was interrupted.

    Attributes:
        changed: notified when it is set. Calls that wait for each other wait here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def set(self) -> None:
        """End all waits."""
        super().set()
        with self.changed:
            self.changed.notify_all()


def max_concurrency(devices: Sequence[torch.device]) -> int:
    """How many replicas start at once: on the CPU one per core, elsewhere all."""
    if {device.type for device in devices} != {"cpu"}:
        return len(devices)
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # those that this process may use
    else:
        cores = os.cpu_count() or 1
    return min(len(devices), cores)


def _serve(queue: _Queue, budget: int, ready: threading.Barrier) -> None:
    """Run the tasks of ``queue`` with ``budget`` intra-op threads."""
    # Initialises the thread, or its first operator would reset the number.
    torch.get_num_threads()
    torch.set_num_threads(budget)
    ready.wait()
    del ready
    timeout = _IDLE_SECONDS if _FREE_THREADED else None
    while True:
        try:
            task = queue.get(timeout=timeout)
        except Empty:
            continue
        if task is None:
            return
        task()
        del task  # else it would stay alive until the next one comes


def _shut_down(
    queues: Sequence[_Queue], threads: Sequence[threading.Thread], pid: int
) -> None:
    """End the threads of ``queues`` and wait for them, if they are this process's."""
    if os.getpid() != pid:  # a forked child has none of these threads
        return
    for queue in queues:
        # After the calls that it still has.
        queue.put(None)
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        # A worker may be the thread that collects its own ``Workers``.
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class Job:
    """One call per replica, without arguments. ::

        number < at_once     starts immediately
        each other number    starts when a call ends, or after 10 ms

    Whatever is used is dropped: a traceback that refers to the job would keep
    activations alive.

    Attributes:
        calls: the calls that have not started, by number.
        busy: the numbers of the calls that have not ended.
        results: what calls have returned, by number; ``None`` before that.
        errors: what calls have raised; and, under ``_CALLER``, an interrupt.
        cancel: set when a call has failed.
        ended: gets an entry when the last call has ended.
    """

    def __init__(
        self,
        calls: dict[int, Callable[[], Any]],
        at_once: int,
        cancel: threading.Event,
    ) -> None:
        self.calls = calls
        self.busy = set(self.calls)
        self.results: dict[int, Any] = dict.fromkeys(calls)
        self.errors: dict[int, BaseException] = {}
        self.cancel = cancel
        # Safe against interrupts: the queue holds no Python lock.
        self.ended: SimpleQueue[None] = SimpleQueue()
        self._at_once = at_once
        self._ended_calls = threading.Semaphore(0)  # each lets one call start

    def run(self, number: int) -> None:
        """Run the call with this ``number`` when it may start; never raises."""
        call = self.calls.pop(number, None)
        if number >= self._at_once:
            self._ended_calls.acquire(timeout=_HEAD_START_SECONDS)
            if self.cancel.is_set():
                call = None
        try:
            if call is not None:
                self.results[number] = call()
        except BaseException as error:
            leave_out_own_frames(error)
            self.errors[number] = error
            self.cancel.set()
        del call
        # Also after an error: calls that wait would else wait their whole time.
        self._ended_calls.release()
        self.busy.discard(number)
        if not self.busy:
            self.ended.put(None)

    def stop(self) -> None:
        """Cancel the calls; those that have not started yet do not start."""
        self.calls.clear()
        self.cancel.set()

    def first_error(self) -> BaseException | None:
        """A refusal, or else the error of the lowest number; with the others in its
        notes.

        ``None`` without errors.
        """
        first: BaseException | None = None
        for is_refusal in (True, False):
            for number, error in sorted(self.errors.items()):
                if isinstance(error, Refusal) != is_refusal:
                    continue
                if isinstance(error, Cancelled) or error is first:
                    continue
                description = _repr_of_error(error)
                if first is None:
                    first = error
                # Several replicas often fail in the same way.
                elif description != _repr_of_error(first):
                    add_note(first, f"replica {number} failed too: {description}")
        return first


# By process, since a fork copies them, and module.
_claims: dict[tuple[int, int], Workers] = {}


class Workers:
    """One daemon thread per replica, named after its device.

    They start with the first parallel call, and stop when the object is closed or
    collected, or the interpreter exits.

    Args:
        devices: one entry per replica; ``None`` if it is not known yet.
        owner: the name of the engine in errors.

    Attributes:
        count: the number of threads.
        interrupts: those of the step that is in progress.
        abandoned: true from a call that has not ended in its time, until the engine
            has dropped the replicas that its thread may still write.
    """

    def __init__(self, devices: Sequence[torch.device | None], owner: str) -> None:
        self.count = len(devices)
        suffixes = ["" if device is None else f", {device}" for device in devices]
        self._names = [
            f"scatterpar replica {number}{suffix}"
            for number, suffix in enumerate(suffixes)
        ]
        self._owner = owner
        self._lock = threading.Lock()
        # ``close`` runs before or after all calls of a job are queued.
        self._posting = threading.RLock()
        self._pid = os.getpid()
        self._closed = False  # true from ``close`` on
        # True from the beginning of a job until it succeeds: if it fails, the next job
        # waits until objects of its error are freed.
        self._failed = False
        self.interrupts = Interrupts()
        self.abandoned = False
        self._queues: list[_Queue] = []
        self._threads: list[threading.Thread] = []
        self._stop: weakref.finalize[..., Workers] | None = None

    def parallel_apply(
        self,
        modules: Sequence[Callable[..., Any]],
        inputs: Sequence[tuple[Any, ...]],
        devices: Sequence[torch.device],
        cancel: threading.Event | None = None,
        at_once: int | None = None,
        seconds: float | None = None,
    ) -> list[Any]:
        """Call ``modules[i](*inputs[i])`` on ``devices[i]``, in parallel.

        A single call without ``seconds`` runs in the caller's thread. On the CPU as
        many calls start as there are cores: short calls that compete for cores and for
        the GIL cost several times as much. But calls may wait for each other, so all
        start soon: after ``at_once`` calls the next ones start 10 ms later. Calls that
        share a thread (``threads_of``) run one after the other.

        If a call fails, ``cancel`` is set, the others are waited for, and the error of
        the lowest replica is raised, with the others in its notes. So is an interrupt.
        A second interrupt, or the end of ``seconds`` (``Overdue``), abandons the
        threads; then ``abandoned`` is true.
        """
        memory.tune_malloc(devices[0])
        # With a limit it needs a thread that can be abandoned.
        try:
            if len(modules) == 1 and seconds is None:
                device = devices[0]
                with (
                    streams.use_device(device, ()),
                    no_autocast_cache(),
                    parametrized_in_threads,
                    self.interrupts.allowed(),
                ):
                    return [modules[0](*inputs[0])]
            warn_of_what_replicas_lack()
            context = CallerContext()
            calls = [
                context.bound(device, module, args)
                for module, args, device in zip(modules, inputs, devices, strict=True)
            ]
            if at_once is None:
                at_once = max_concurrency(devices)
            job = Job(dict(enumerate(calls)), at_once, cancel or threading.Event())
            deadline = math.inf if seconds is None else time.monotonic() + seconds
            with SETTINGS_KEPT, parametrized_in_threads:
                self._post(job, dict(enumerate(threads_of(devices))))
                return self.results_of(job, deadline)
        except BaseException as failure:
            leave_out_own_frames(failure)
            raise

    def results_of(self, job: Job, deadline: float = math.inf) -> list[Any]:
        """Returns the results of a job's calls, in order; raises its first error."""
        try:
            self._wait(job, deadline)
            error = job.first_error()
            if error is not None:
                raise error
            return [*job.results.values()]
        finally:
            # A traceback refers to this frame.
            job.results = {}
            job.errors = {}
            error = None

    def _post(self, job: Job, threads: Mapping[int, int]) -> None:
        """Queue the job's calls: by the number of each, that of the thread."""
        with self._posting:
            self._refuse_if_closed()
            queues = self._started()
            for number, thread in threads.items():
                queues[thread].put(partial(job.run, number))

    @contextlib.contextmanager
    def exclusive(self, module: nn.Module | None = None) -> Iterator[None]:
        """In the body, this thread owns the workers and claims ``module``.

        Interrupts are deferred. Raises ``RuntimeError`` if the workers are closed, busy
        or another process's, or if another engine has claimed the module: both would
        add to ``.grad`` at once. So it does in a transform of ``torch.func``.
        """
        self._refuse_if_closed()
        if is_transformed():
            raise RuntimeError(
                f"{self._owner} cannot be transformed by torch.func (grad, vmap, jvp, "
                "…), because its replicas compute in threads of their own; transform "
                "its module instead, .module"
            )
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._owner} belongs to another process: threads do not survive a "
                "fork; make another one in this process"
            )
        key = self._pid, id(module)
        with Interrupts() as interrupts:  # first: none between the lock and the try
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(
                    f"{self._owner} is in the middle of a step: another step cannot "
                    "start from inside a criterion or a hook, nor from a second "
                    "thread; start the other step after this one"
                )
            try:
                # ``setdefault`` is atomic: of two threads, one gets the other's claim.
                if module is not None and _claims.setdefault(key, self) is not self:
                    raise RuntimeError(
                        "another engine is in the middle of a step that trains this "
                        f"{type(module).__name__}; give each thread a copy of the "
                        "module"
                    )
                self.interrupts = interrupts
                if self._failed:
                    self._await_deferred_frees()
                self._failed = True
                yield
                self._failed = False
            except BaseException as error:
                # Else the caller's next try would run out, too.
                if memory.is_out_of_memory(error):
                    memory.clear_frames(error)
                raise
            finally:
                # It may be the claim of another engine, which refused this one.
                if _claims.get(key) is self:
                    del _claims[key]
                self._lock.release()

    def release(self) -> None:
        """Free cached memory.

        Call it in the body of ``exclusive``, outside ``parallel_apply``.
        """
        self._await_deferred_frees()
        memory.empty_cache()

    def _await_deferred_frees(self) -> None:
        """Wait until idle workers have freed their objects, in free-threaded Python."""
        if _FREE_THREADED:
            # Several rounds: a freed object may refer to one of another worker.
            time.sleep(3 * _IDLE_SECONDS)

    def close(self) -> None:
        """Stop the threads and wait for them; later jobs are refused."""
        with self._posting:
            self._closed = True
        if self._stop is not None:
            self._stop()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self._owner} is closed; make another to go on")

    def _wait(self, job: Job, deadline: float) -> None:
        """Wait until all calls have ended. An interrupt becomes the first error.

        If calls go on for some seconds after it, a line on stderr and a note say where.
        """
        tells_at = math.inf
        while job.busy:
            if time.monotonic() > tells_at:
                tells_at = math.inf
                text = self._text_of_waiting(job)
                print(text, file=sys.stderr, flush=True)
                add_note(job.errors[_CALLER], text)
            if time.monotonic() > deadline:
                job.stop()
                self._abandon()
                raise Overdue
            try:
                with self.interrupts.allowed(), contextlib.suppress(Empty):
                    job.ended.get(timeout=_LOOK_SECONDS)
            except BaseException as error:
                # The interrupt may have come before ``allowed`` did this.
                self.interrupts.are_allowed = False
                job.stop()
                if _CALLER in job.errors:  # the second interrupt
                    self._abandon()
                    raise
                job.errors[_CALLER] = error
                tells_at = time.monotonic() + _HANG_SECONDS

    def _text_of_waiting(self, job: Job) -> str:
        """Describe the calls that go on after an interrupt, by their lines of user
        code.
        """
        frames = frames_of_threads()
        places: list[str] = []
        for number in sorted(job.busy):
            thread = self._threads[number]
            frame = frames.get(thread.ident or 0)
            where = "" if frame is None else f" in {_line_of_user(frame)}"
            places.append(f"{thread.name.removeprefix('scatterpar ')}{where}")
        return (
            f"Ctrl-C: the step waits for {'; '.join(places)}. A second Ctrl-C does not "
            "wait"
        )

    def _abandon(self) -> None:
        """Let threads that still work end by themselves; a later job starts others."""
        self.abandoned = True
        for queue in self._queues:
            queue.put(None)
        self._stop = None
        self._queues = []

    def _started(self) -> list[_Queue]:
        """The queues of the threads, which start now if they do not run."""
        if self._stop is not None and self._stop.alive:
            return self._queues
        # Makes autograd's engine: in a forked child two threads must not both make it.
        torch.autograd.backward(())
        before = torch.get_num_threads()
        budget = max(1, before // len(self._names))
        self._queues = [SimpleQueue() for _ in self._names]
        # So that all have set their number of threads before it is restored here.
        ready = threading.Barrier(len(self._names) + 1)
        self._threads = [
            threading.Thread(
                target=_serve, args=(queue, budget, ready), daemon=True, name=name
            )
            for queue, name in zip(self._queues, self._names, strict=True)
        ]
        for thread in self._threads:
            # In a new context: a thread would keep the caller's alive.
            contextvars.Context().run(thread.start)
        ready.wait()
        # A worker's setting became the default of later threads.
        torch.set_num_threads(before)
        self._stop = weakref.finalize(
            self, _shut_down, self._queues, self._threads, self._pid
        )
        return self._queues


def threads_of(devices: Sequence[torch.device]) -> list[int]:
    """The number of the thread for each call.

    Calls on one accelerator draw from its one generator, so they run in order: in the
    thread of the first. So do calls on the host if torch cannot tell their draws apart.
    """
    generators: list[object] = []  # an accelerator's, the host's, or one of its own
    for number, device in enumerate(devices):
        is_shared = streams.is_async(device) or not HAS_RANDOM_KEY
        generators.append(physical(device) if is_shared else number)
    return [generators.index(generator) for generator in generators]


def _line_of_user(frame: FrameType) -> str:
    """The innermost line of a thread that is no library's, or else the innermost."""
    lines = traceback.extract_stack(frame)
    of_user = [line for line in lines if not is_library_file(line.filename)]
    line = [*lines, *of_user][-1]
    return f"{line.filename}:{line.lineno} {line.name}"


def _repr_of_error(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # a user's own __repr__
        return type(error).__name__
