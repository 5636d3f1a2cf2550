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
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from scatterpar.devices import memory, streams
from scatterpar.errors import add_note
from scatterpar.threads.caller_context import CallerContext, no_autocast_cache
from scatterpar.threads.interrupts import Interrupts

_Queue = SimpleQueue[Callable[[], object] | None]

_HEAD_START_SECONDS = 0.01  # the first replicas have the cores alone for this time
_LOOK_SECONDS = 0.5  # on Windows no signal interrupts a longer wait
_CALLER = -1  # the number of an error that was raised in the caller's thread
_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_IDLE_SECONDS = 0.1
_EXIT_SECONDS = 4.0  # time for running calls to end when the workers stop


def _serve(queue: _Queue, budget: int, ready: threading.Barrier) -> None:
    """Run the tasks of ``queue`` with ``budget`` intra-op threads."""
    # initialises the thread, or its first operator would reset the number
    torch.get_num_threads()
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


def _shut_down(
    queues: Sequence[_Queue], threads: Sequence[threading.Thread], pid: int
) -> None:
    """End the threads of ``queues`` and wait for them, if they are this process's."""
    if os.getpid() != pid:  # a forked child has none of these threads
        return
    for queue in queues:
        queue.put(None)
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class Job:
    """One call per replica, without arguments; ``cancel`` is set when one has failed.

    The first ``at_once`` calls start immediately, each other one when a call ends or
    after 10 ms. Whatever is used is dropped: a traceback that refers to the job would
    keep activations alive.
    """

    def __init__(
        self, calls: Sequence[Callable[[], Any]], at_once: int, cancel: threading.Event
    ) -> None:
        self.calls = dict(enumerate(calls))  # those that have not started
        self.busy = set(self.calls)  # the numbers of those that have not ended
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.cancel = cancel
        # safe against interrupts: holds no lock
        self.ended: SimpleQueue[None] = SimpleQueue()
        self._at_once = at_once
        self._ended_calls = threading.Semaphore(0)  # each lets one call start

    def run(self, number: int) -> None:
        """Run the call with this ``number`` when it may start; never raises."""
        call = self.calls.pop(number, None)
        if number >= self._at_once:
            self._ended_calls.acquire(timeout=_HEAD_START_SECONDS)
            call = None if self.cancel.is_set() else call
        try:
            if call is not None:
                self.results[number] = call()
        except BaseException as error:
            self.errors[number] = error
            self.cancel.set()
        del call
        self._ended_calls.release()
        self.busy.discard(number)
        if not self.busy:
            self.ended.put(None)

    def stop(self) -> None:
        """Cancel the calls; those that have not started yet do not start."""
        self.calls.clear()
        self.cancel.set()

    def first_error(self) -> BaseException | None:
        """The error of the lowest number, with the others in its notes; ``None``
        without errors.
        """
        failed = [
            (i, e)
            for i, e in sorted(self.errors.items())
            if not isinstance(e, Cancelled)
        ]
        for i, error in failed[1:]:
            first, text = failed[0][1], _described(error)
            if error is not first and text != _described(first):
                add_note(first, f"replica {i} failed too: {text}")
        return failed[0][1] if failed else None


class Overdue(Exception):
    """Calls have not ended within the limit; their threads are abandoned."""


class Cancelled(Exception):
    """Ends a replica's work at its next sub-step after another has failed; users never
    see it.
    """


# by process, since a fork copies them, and module
_claims: dict[tuple[int, int], Workers] = {}


class Workers:
    """One daemon thread per replica, named after its device; ``owner`` is the name in
    errors.

    They start with the first parallel call, and stop when the object is closed or
    collected, or the interpreter exits.
    """

    def __init__(self, devices: Sequence[torch.device | None], owner: str) -> None:
        self.count = len(devices)
        where = ["" if device is None else f", {device}" for device in devices]
        self._names = [
            f"scatterpar replica {i}{device}" for i, device in enumerate(where)
        ]
        self._owner = owner
        self._lock = threading.Lock()
        # close() runs before or after all calls are queued
        self._posting = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        # whether the last job failed; then its error's objects must be freed
        self._failed = False
        self.interrupts = Interrupts()
        self.abandoned = False
        self._queues: list[_Queue] = []
        self._stop: weakref.finalize[..., Workers] | None = None

    def parallel_apply(
        self,
        modules: Sequence[Callable[..., Any]],
        inputs: Sequence[tuple[Any, ...]],
        devices: Sequence[torch.device],
        cancel: threading.Event | None = None,
        is_serial: bool = False,
        seconds: float | None = None,
    ) -> list[Any]:
        """Call ``modules[i](*inputs[i])`` on ``devices[i]``, in parallel.

        A single call runs in the caller's thread. On the CPU as many calls start as
        there are cores: short calls that compete for cores and for the GIL cost several
        times as much. But calls may wait for each other, so all start soon. Calls on
        the same accelerator run one after the other, and all with ``is_serial``.

        If a call fails, ``cancel`` is set, the others are waited for, and the error of
        the lowest replica is raised, with the others in its notes. So is an interrupt.
        A second interrupt, or the end of ``seconds`` (``Overdue``), abandons the
        threads; then ``abandoned`` is true.
        """
        memory.tune_malloc(devices[0])
        if len(modules) == 1:
            with (
                streams.use_device(devices[0], ()),
                no_autocast_cache(),
                self.interrupts.allowed(),
            ):
                return [modules[0](*inputs[0])]
        context = CallerContext()
        calls = [
            partial(context.run, device, partial(module, *args))
            for module, args, device in zip(modules, inputs, devices, strict=True)
        ]
        job = Job(calls, max_concurrency(devices), cancel or threading.Event())
        # Calls on one accelerator draw from its one generator, so they run in order.
        threads = [
            devices.index(d) if streams.is_async(d) else i
            for i, d in enumerate(devices)
        ]
        with self._posting:
            self._refuse_if_closed()
            queues = self._started()
            for number, thread in enumerate(threads):
                queues[0 if is_serial else thread].put(partial(job.run, number))
        try:
            self._wait(job, math.inf if seconds is None else time.monotonic() + seconds)
            error = job.first_error()
            if error is not None:
                raise error
            return [job.results.get(number) for number in range(len(calls))]
        finally:
            job.results, job.errors = {}, {}  # a traceback refers to this frame
            error = None

    @contextlib.contextmanager
    def exclusive(self, module: nn.Module | None = None) -> Iterator[None]:
        """In the body, this thread owns the workers and claims ``module``; interrupts
        are deferred.

        Raises ``RuntimeError`` if the workers are closed, busy or another process's, or
        if another engine has claimed the module: both would add to ``.grad`` at once.
        """
        self._refuse_if_closed()
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._owner} belongs to another process: threads do not survive a "
                "fork; make "
                f"another in the process that uses it"
            )
        key = self._pid, id(module)
        # first: no interrupt between the lock and the try
        with Interrupts() as interrupts:
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(
                    f"{self._owner} is in the middle of a step: another cannot start "
                    "from "
                    f"inside a criterion or a hook, nor from a second thread"
                )
            try:
                # atomic
                if module is not None and _claims.setdefault(key, self) is not self:
                    raise RuntimeError(
                        f"another engine is in the middle of a step that trains this "
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
                # else the caller's next try runs out, too
                if memory.is_out_of_memory(error):
                    memory.clear_frames(error)
                raise
            finally:
                if _claims.get(key) is self:
                    del _claims[key]
                self._lock.release()

    def release(self) -> None:
        """Free cached memory; call it in the body of ``exclusive``, outside
        ``parallel_apply``.
        """
        self._await_deferred_frees()
        memory.empty_cache()

    def _await_deferred_frees(self) -> None:
        """In free-threaded Python, wait until idle workers have freed the objects they
        created.
        """
        if _FREE_THREADED:
            # freed objects may refer to those of another worker
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
        """Wait until all calls have ended; an interrupt becomes the
        job's first error.
        """
        while job.busy:
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
                if _CALLER in job.errors:
                    self._abandon()
                    raise
                job.errors[_CALLER] = error

    def _abandon(self) -> None:
        """Let threads that still work end by themselves; the next job
        starts new ones.
        """
        self.abandoned = True
        for queue in self._queues:
            queue.put(None)
        self._stop, self._queues = None, []

    def _started(self) -> list[_Queue]:
        if self._stop is not None and self._stop.alive:
            return self._queues
        # in a forked child two threads must not both make the engine
        torch.autograd.backward(())
        before = torch.get_num_threads()
        budget = max(1, before // len(self._names))
        self._queues = [SimpleQueue() for _ in self._names]
        ready = threading.Barrier(len(self._names) + 1)
        threads = [
            threading.Thread(
                target=_serve, args=(queue, budget, ready), daemon=True, name=name
            )
            for queue, name in zip(self._queues, self._names, strict=True)
        ]
        for thread in threads:  # a new context: a thread would keep the caller's alive
            contextvars.Context().run(thread.start)
        ready.wait()
        # a worker's setting became the default of later threads
        torch.set_num_threads(before)
        self._stop = weakref.finalize(
            self, _shut_down, self._queues, threads, self._pid
        )
        return self._queues


def _described(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # a user's own __repr__
        return type(error).__name__


def max_concurrency(devices: Sequence[torch.device]) -> int:
    """How many replicas start at the same time: on the CPU one per core,
    elsewhere all.
    """
    if {device.type for device in devices} != {"cpu"}:
        return len(devices)
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return min(len(devices), cores or 1)
