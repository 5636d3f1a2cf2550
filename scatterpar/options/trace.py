"""``engine.trace()``: when each replica did what, as a table, and for Perfetto.

A traced step is the ``Clock`` of its attempts: each part of the step becomes an
``Event``. The times are the host's. Work on an accelerator also has two marks on its
stream, because the host only launches it; ``Event.on_device`` reads them when the trace
is printed or saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Any

import torch

from scatterpar.devices.streams import has_streams
from scatterpar.plan import Share
from scatterpar.step.attempt import Clock, profiler_block
from scatterpar.tables import Printed, as_text

# Parts that launch work on devices.
_LAUNCHES = "forward", "criterion", "backward", "recompute", "replay"
_OF_REPLICAS = (  # in the order of columns
    "arrival",
    "forward",
    "recompute",
    "criterion",
    "backward",
    "capture",
    "replay",
)
_AFTER_PARTS = "waited", "on device"
# What a step does once, by the names of the table.
_PHASES = {
    "scatter": "scatter",
    "replicate": "replicate",
    "reduce": "reduce",
    "commit": "commit",
    "checks and compiling": "verify",
    "computing": "computing",
}

Zero = tuple[torch.Event, float]  # a mark on a stream, and its time by the host's clock


@dataclass
class Event:
    """One part of a traced step.

    Attributes:
        name: the kind of work, such as ``"forward"``.
        share: that of the replica; ``None`` for the caller's thread.
        sub_step: the number of the micro-batch; ``None`` if it belongs to none.
        zero: that of the accelerator on which the host launched work.
        marks: on the stream, before that work and after it.
        start: when the host began, in seconds of ``time.perf_counter()``.
        end: when the host was done; on an accelerator, when all work was launched.
    """

    name: str
    share: Share | None
    sub_step: int | None
    zero: Zero | None
    marks: list[torch.Event] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0

    def now(self) -> float:
        """The time; marks the stream on which the work is launched."""
        if self.zero is not None and self.share is not None:
            # An event on the stream costs the device nothing; to wait for it here would
            # end the overlap that a trace is to show.
            self.marks.append(_timed_mark(self.share.device))
        return time.perf_counter()

    @property
    def replica(self) -> int | None:
        """The number of the replica; ``None`` for the caller's thread."""
        return self.share.replica if self.share else None

    @property
    def ms(self) -> float:
        """Milliseconds by the host's clock."""
        return (self.end - self.start) * 1e3

    @property
    def on_device(self) -> tuple[float, float] | None:
        """Start and end of the work on an accelerator, by the host's clock.

        ``None`` for other work, and on a device that has failed.
        """
        if self.zero is None:
            return None
        zero, host_time = self.zero
        times: list[float] = []
        # After a kernel's error every call of its device raises; host times are still
        # true.
        with contextlib.suppress(RuntimeError):
            for mark in self.marks:
                mark.synchronize()  # torch compares marks that are known to be done
                times.append(host_time + zero.elapsed_time(mark) / 1e3)
            start, end = times
            return start, end
        return None


@dataclass
class TracedStep:
    """One step of a trace.

    Attributes:
        number: that of the step in the trace, from 0.
        zeros: a mark on each accelerator with streams.
        events: the parts of the step, in order of their ends.
        start: when it began.
        end: when it was committed, or failed.
        error: the exception as text, if the step failed.
    """

    number: int
    zeros: Mapping[torch.device, Zero]
    events: list[Event] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    error: str | None = None

    @contextlib.contextmanager
    def clock(
        self, name: str, share: Share | None = None, sub_step: int | None = None
    ) -> Iterator[None]:
        """Record the body as an event, also for a profiler beside the trace."""
        zero = None
        if share is not None and name in _LAUNCHES:
            zero = self.zeros.get(share.device)
        event = Event(name, share, sub_step, zero)
        with profiler_block(name, share, sub_step):
            event.start = event.now()
            try:
                yield
            finally:
                event.end = event.now()
                self.events.append(event)


class Trace(Printed):
    """The steps of an engine that ``engine.trace()`` recorded; ``print`` shows a table.

    Attributes:
        steps: the recorded steps, in order. Each has ``start``, ``end``, ``error`` and
            ``events``.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.steps: list[TracedStep] = []
        self.clock: Clock | None = None  # of attempts; ``None`` outside of a step
        self._devices = devices
        self._zeros: dict[torch.device, Zero] = {}
        for device in filter(has_streams, devices):
            mark = _timed_mark(device)
            mark.synchronize()
            # Read right after the wait: so a mark's time is known by the host's clock,
            # too.
            self._zeros[device] = (mark, time.perf_counter())
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The body is a step."""
        step = TracedStep(len(self.steps), self._zeros)
        self.steps.append(step)
        self.clock = step.clock
        try:
            yield
        except BaseException as error:
            step.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            step.end = time.perf_counter()
            self.clock = None

    def _events(self) -> Iterator[tuple[TracedStep, Event]]:
        """Yield every event with its step."""
        for step in self.steps:
            for event in [*step.events]:  # a copy: an abandoned worker may append
                yield step, event

    def __str__(self) -> str:
        """A table with one line per replica, in milliseconds per step."""
        if not self.steps:
            return "No step was recorded."
        number = len(self.steps)
        in_steps = sum(step.end - step.start for step in self.steps) * 1e3 / number
        # The loop's own work, such as the optimizer's step, is between the steps.
        since_start = (self.steps[-1].end - self._start) * 1e3 / number
        ms = self._ms_per_step()
        parts = [f"{text} {ms[None, name]:,.1f}" for text, name in _PHASES.items()]
        lines = [
            f"{number} {'step' if number == 1 else 'steps'} of {in_steps:,.1f} ms, "
            f"{since_start - in_steps:,.1f} ms between steps; in ms per step:",
            as_text(self._table(ms)),
            f"for all: {', '.join(parts)}",
            *self._longest(),
        ]
        for step in self.steps:
            if step.error:
                lines.append(f"step {step.number} failed: {step.error}")
        return "\n".join(lines)

    def _ms_per_step(self) -> defaultdict[tuple[int | None, str], float]:
        """Milliseconds per step, by replica and name."""
        number = len(self.steps)
        ms: defaultdict[tuple[int | None, str], float] = defaultdict(float)
        for _, event in self._events():
            ms[event.replica, event.name] += event.ms / number
            if (on_device := event.on_device) is not None:
                start, end = on_device
                ms[event.replica, "on device"] += (end - start) * 1e3 / number
        # Looks are a part of the computation's time, and are shown by themselves.
        computing = ms[None, "compute"] - ms[None, "verify"]
        ms[None, "computing"] = computing
        for replica in range(len(self._devices)):
            # It waited for a lock, for its device, or for slower replicas. Clocks of
            # threads differ a little: less than nothing is nothing.
            busy = sum(ms[replica, name] for name in _OF_REPLICAS)
            ms[replica, "waited"] = max(0.0, computing - busy)
        return ms

    def _table(self, ms: defaultdict[tuple[int | None, str], float]) -> list[list[str]]:
        """One line per replica: the times of its parts, and how long its thread waited.

        Parts that no replica has are left out.
        """
        names = [
            name
            for name in (*_OF_REPLICAS, *_AFTER_PARTS)
            if any(ms[replica, name] for replica in range(len(self._devices)))
        ]
        table = [["replica", "device", *names]]
        for replica, device in enumerate(self._devices):
            times = [f"{ms[replica, name]:,.1f}" for name in names]
            table.append([str(replica), str(device), *times])
        return table

    def _longest(self) -> list[str]:
        """A line about the longest sub-step; none if no sub-step was recorded."""
        ms: defaultdict[tuple[int, int | None, int], float] = defaultdict(float)
        for step, event in self._events():
            if event.sub_step is not None:
                ms[event.sub_step, event.replica, step.number] += event.ms
        if not ms:
            return []
        # Forward, criterion and backward of a sub-step are one.
        (sub_step, replica, step_number), longest = max(ms.items(), key=itemgetter(1))
        return [
            f"The longest sub-step, {sub_step} of replica {replica} in step "
            f"{step_number}, took {longest:,.1f} ms; the median is "
            f"{median(ms.values()):,.1f} ms."
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to ``path`` for https://ui.perfetto.dev or chrome://tracing.

        The file is in the trace event format (JSON), with times in microseconds. The
        caller, each replica and each replica's accelerator have a thread of complete
        events (``"ph": "X"``).
        """
        rows: list[dict[str, Any]] = []
        threads: dict[str, int] = {}  # the number of each, by name
        for thread, name, start, end, arguments in self._spans():
            # Viewers sort by this number: the caller, with the first span, is first.
            number = threads.setdefault(thread, len(threads))
            times = {"ts": (start - self._start) * 1e6, "dur": (end - start) * 1e6}
            rows.append(_row("X", number, name, arguments) | times)
        for thread, number in threads.items():
            # Viewers show a thread's number until an event of this kind names it.
            rows.append(_row("M", number, "thread_name", {"name": thread}))
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)

    def _spans(self) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
        """Yield the thread, name, start, end and arguments of all that viewers show."""
        for step in self.steps:
            arguments = {"step": step.number, "error": step.error}
            yield "caller", "step", step.start, step.end, arguments
        for step, event in self._events():
            thread = "caller"
            if event.share is not None:
                thread = f"replica {event.share.replica}, {event.share.device}"
            numbers = {"step": step.number, "sub_step": event.sub_step}
            yield thread, event.name, event.start, event.end, numbers
            on_device = event.on_device
            if on_device is not None:
                where = "on the device"
                yield f"{thread} {where}", f"{event.name} {where}", *on_device, {}


def _row(
    kind: str, thread: int, name: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """An event as viewers read it, without times."""
    return {"ph": kind, "pid": 0, "tid": thread, "name": name, "args": arguments}


def _timed_mark(device: torch.device) -> torch.Event:
    """An event with a time, recorded on the current stream of a device with streams."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
