"""``engine.trace()``: when each replica did what, as a table and as a file for
Perfetto.

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
from statistics import median
from typing import Any

import torch

from scatterpar.devices.streams import has_streams
from scatterpar.plan import Share
from scatterpar.step.attempt import Clock, profiler_block
from scatterpar.tables import Printed, as_text

# Parts that launch work on devices.
_LAUNCHES = "forward", "criterion", "backward", "recompute", "replay"
_ORDER = (
    *("scatter", "replicate", "verify", "compute", "reduce", "commit"),
    *("arrival", "forward", "recompute", "criterion", "backward", "capture", "replay"),
)
# what a step does once, beside computing
_PHASES = "scatter", "replicate", "reduce", "commit"

Zero = tuple[torch.Event, float]  # a mark on a stream, and its time by the host's clock


@dataclass
class Event:
    """One part of a traced step."""

    name: str  # the kind of work, such as ``"forward"``
    share: Share | None  # of the replica that did it; ``None`` for the caller's thread
    # the number of the micro-batch; ``None`` if it belongs to none
    sub_step: int | None
    zero: Zero | None  # of the accelerator on which it launched work
    # before that work, and after it
    marks: list[torch.Event] = field(default_factory=list)
    start: float = 0.0  # when the host began, in seconds of ``time.perf_counter()``
    # when the host was done; on an accelerator, when all work was launched
    end: float = 0.0

    def now(self) -> float:
        """The time; marks the stream on which the work is launched."""
        if self.zero is not None and self.share is not None:
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
        """Start and end of the work on an accelerator, by the host's clock; else
        ``None``.
        """
        with contextlib.suppress(RuntimeError):  # of a device that failed
            # torch compares two marks if both are known to be done
            for mark in self.marks:
                mark.synchronize()
            if self.zero is not None:
                zero, at = self.zero
                first, last = (
                    at + zero.elapsed_time(mark) / 1e3 for mark in self.marks
                )
                return first, last
        return None


@dataclass
class TracedStep:
    """One step of a trace."""

    number: int  # of the step in the trace, from 0
    zeros: Mapping[torch.device, Zero]  # of each accelerator with streams
    # its parts, in order of their ends
    events: list[Event] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    end: float = 0.0  # when it was committed, or failed
    error: str | None = None  # the exception as text, if the step failed

    @contextlib.contextmanager
    def clock(
        self, name: str, share: Share | None = None, sub_step: int | None = None
    ) -> Iterator[None]:
        """Record the body as an event, for a profiler that runs beside
        the trace, too.
        """
        zero = self.zeros.get(share.device) if share and name in _LAUNCHES else None
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
        self._zeros: dict[torch.device, Zero] = {}
        for device in filter(has_streams, devices):
            mark = _timed_mark(device)
            mark.synchronize()
            self._zeros[device] = mark, time.perf_counter()
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
            step.end, self.clock = time.perf_counter(), None

    def _events(self) -> Iterator[tuple[TracedStep, Event]]:
        """Every event with its step; of copies, because an abandoned
        worker may append.
        """
        return ((step, event) for step in self.steps for event in [*step.events])

    def __str__(self) -> str:
        """A table with one line per replica, and the phases, in
        milliseconds per step.
        """
        if not self.steps:
            return "No step was recorded."
        number = len(self.steps)
        in_steps = sum(step.end - step.start for step in self.steps) * 1e3 / number
        between = (self.steps[-1].end - self._start) * 1e3 / number - in_steps
        # by replica and name
        ms: defaultdict[tuple[int | None, str], float] = defaultdict(float)
        for _, event in self._events():
            ms[event.replica, event.name] += event.ms / number
            if times := event.on_device:
                ms[event.replica, "on device"] += (times[1] - times[0]) * 1e3 / number
        parts = {
            "computing": ms[None, "compute"] - ms[None, "verify"],
            "checks and compiling": ms[None, "verify"],
            "scatter, replicate, reduce and commit": sum(
                ms[None, name] for name in _PHASES
            ),
            "the caller, between steps": between,
        }
        total = max(in_steps + between, 1e-6)
        largest = sorted(
            ((part / total, name) for name, part in parts.items()), reverse=True
        )
        once = [(name, ms[None, name]) for name in _ORDER if name != "compute"]
        lines = [
            f"{number} {'step' if number == 1 else 'steps'} of {in_steps:,.1f} ms, "
            f"{between:,.1f} ms between steps; in ms per step:",
            as_text(self._table(ms, parts["computing"])),
            "for all: "
            + ", ".join(f"{name} {part:,.1f}" for name, part in once if part >= 0.05),
            "Of the time: "
            + ", ".join(f"{part:.0%} {name}" for part, name in largest)
            + ".",
            *self._longest(),
        ]
        lines += [
            f"step {step.number} failed: {step.error}"
            for step in self.steps
            if step.error
        ]
        return "\n".join(lines)

    def _table(
        self, ms: Mapping[tuple[int | None, str], float], computing: float
    ) -> list[list[str]]:
        """One line per replica: the times of its parts, and how long its
        thread waited.
        """
        devices = {
            e.share.replica: e.share.device for _, e in self._events() if e.share
        }
        names = [
            name
            for name in _ORDER
            if any(ms.get((replica, name)) for replica in devices)
        ]
        last = ["on device"] if any(name == "on device" for _, name in ms) else []
        table = [["replica", "device", *names, "waited", *last]]
        for replica, device in sorted(devices.items()):
            own = [ms[replica, name] for name in names]
            # Its thread waited for a lock, for its device, or for slower replicas.
            own += [
                max(0.0, computing - sum(own)),
                *(ms[replica, name] for name in last),
            ]
            table.append([str(replica), str(device), *(f"{part:,.1f}" for part in own)])
        return table

    def _longest(self) -> list[str]:
        """A line about the longest sub-step; none if no sub-step was recorded."""
        ms: defaultdict[tuple[int, int | None, int], float] = defaultdict(float)
        for step, event in self._events():
            if event.sub_step is not None:
                ms[event.sub_step, event.replica, step.number] += event.ms
        if not ms:
            return []
        sub_step, replica, number = longest = max(ms, key=ms.__getitem__)
        return [
            f"The longest sub-step, {sub_step} of replica {replica} in step {number}, "
            "took "
            f"{ms[longest]:,.1f} ms; the median is {median(ms.values()):,.1f} ms."
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to ``path`` for https://ui.perfetto.dev or chrome://tracing.

        The file is in the trace event format (JSON), with times in microseconds. The
        caller, each replica and each replica's accelerator have a thread of complete
        events (``"ph": "X"``).
        """
        rows: list[dict[str, Any]] = []
        lanes: dict[str, int] = {}

        def add(lane: str, name: str, start: float, end: float, **args: Any) -> None:
            times = {
                "ts": (start - self._start) * 1e6,
                "dur": (end - start) * 1e6,
                "args": args,
            }
            thread = lanes.setdefault(lane, len(lanes))
            rows.append({"name": name, "ph": "X", "pid": 0, "tid": thread, **times})

        for step in self.steps:
            add(
                "caller",
                "step",
                step.start,
                step.end,
                step=step.number,
                error=step.error,
            )
        for step, event in self._events():
            share = event.share
            lane = f"replica {share.replica}, {share.device}" if share else "caller"
            args = {"step": step.number, "sub_step": event.sub_step}
            add(lane, event.name, event.start, event.end, **args)
            if times := event.on_device:
                add(f"{lane} on the device", f"{event.name} on the device", *times)
        for lane, number in lanes.items():
            thread = {"name": "thread_name", "ph": "M", "pid": 0, "tid": number}
            rows.append({**thread, "args": {"name": lane}})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)


def _timed_mark(device: torch.device) -> torch.Event:
    """An event with a time, recorded on the current stream of a device with streams."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
