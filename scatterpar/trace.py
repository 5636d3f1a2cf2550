"""``engine.trace()``: the times of each replica in a step, as a table, a picture and a file.

All use one list of events: the table and the sentence sum it up, the picture shows the events of
one step, and the file has all of them.
"""

from __future__ import annotations

import contextlib
import copy
import html
import json
import math
import os
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from scatterpar.bounds import BETWEEN, Bounds, sums
from scatterpar.devices.runtime import has_streams, timed_mark
from scatterpar.plan import Plan, as_text
from scatterpar.threads.clock import Clock, Event, RecordedStep, Zero

_ON_DEVICE = " on the device"  # the end of a device's lane
_COLOURS = {  # in the order of the columns and of the legend
    BETWEEN: "#e3e7ea",
    "scatter": "#4c78a8",
    "replicate": "#f2a541",
    "verify": "#c3aed6",
    "warm-up": "#c3aed6",
    "capture": "#c3aed6",
    "arrival": "#86b3d9",
    "waiting": "#f7d94c",
    "replay": "#a3b8a0",
    "forward": "#b9ceb6",
    "criterion": "#3d8b7d",
    "recompute": "#dbe5d9",
    "backward": "#6c8f68",
    "reduce": "#d1495b",
    "commit": "#7a2a38",
}
_WIDTH, _LANE = 960, 26  # of a picture, in pixels


class Trace:
    """The steps of an engine, recorded by ``engine.trace()``.

    ``print`` shows a table with a row per replica, in milliseconds per step, and a sentence that
    says what bounds the steps and what to pass. A notebook shows a picture of one step.

    Attributes:
        steps: the recorded steps, in order. Each has a ``plan``, an ``error`` and ``events``.
    """

    def __init__(self, devices: Sequence[torch.device], options: frozenset[str]) -> None:
        self.steps: list[RecordedStep] = []
        self._devices, self._options = devices, options
        self._start = self._end = 0.0
        self._zeros: dict[torch.device, Zero] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Time the body, in which steps are recorded."""
        for device in filter(has_streams, self._devices):
            mark = timed_mark(device)
            mark.synchronize()
            self._zeros[device] = mark, time.perf_counter()
        self._start = time.perf_counter()
        try:
            yield
        finally:
            self._end = time.perf_counter()

    def step(self) -> RecordedStep:
        """A new step, which records the body of ``with``."""
        self.steps.append(RecordedStep(len(self.steps), self._zeros))
        return self.steps[-1]

    def clock(self, plan: Plan) -> Clock:
        """A clock for an attempt at the current step; outside of a step it records nothing."""
        if not self.steps or self.steps[-1].end:
            return Clock()
        self.steps[-1].plan = plan
        return Clock(self.steps[-1])

    def events(self) -> list[Event]:
        """The events of all steps in order of their ends, and the times between steps.

        An event's work on an accelerator is another event, in the lane of the device. Its
        ``self_seconds`` are zero, so that sums count the time once.
        """
        events: list[Event] = []
        last = self._start
        for step in [*self._ended(), None]:
            events.append(wait := Event(step, BETWEEN))
            wait.start, wait.end = last, step.start if step else max(self._end, last)
            wait.self_seconds, last = wait.end - wait.start, step.end if step else last
            for event in list(step.events if step else ()):  # an abandoned worker may append
                events.append(event)
                if event.on_device:
                    events.append(work := copy.copy(event))
                    work.start, work.end = event.on_device
                    work.lane, work.on_device = event.lane + _ON_DEVICE, None
                    work.self_seconds = 0.0
        return events

    def _ended(self) -> list[RecordedStep]:
        return [step for step in self.steps if step.end]

    def bounds(self) -> Bounds:
        """The sums over all events, and what bounds the steps."""
        return Bounds(self.events(), self._ended(), self._devices, self._options)

    def __str__(self) -> str:
        """A table with a row per replica, the phases, and what bounds the steps."""
        if not (count := len(self._ended())):
            return "No step was recorded."
        bounds, per_step = self.bounds(), 1e3 / count
        seconds, replicas = bounds.seconds, bounds.replicas
        names = [name for name in _COLOURS if any(seconds[r, name] for r in replicas)]
        work = [(e.replica, e.seconds) for e in bounds.events if e.on_device]
        on_device, substeps = sums(work), Counter(r for _, r, _ in bounds.of_substeps)
        table = [["replica", "device", "rows", "sub-steps", *names, "idle"]]
        table[0] += ["on device"] if work else []
        for r in replicas:
            times = [seconds[r, name] for name in names]
            times += [max(0.0, bounds.computing - sum(times))] + [on_device[r]] * bool(work)
            sizes = (f"{size / count:,.0f}" for size in (bounds.rows[r], substeps[r]))
            shown = (f"{t * per_step:,.1f}" for t in times)
            table.append([f"{r}", f"{self._devices[r]}", *sizes, *shown])
        once = [(name, seconds[None, name] * per_step) for name in _COLOURS if name != BETWEEN]
        lines = [
            f"{count} {'step' if count == 1 else 'steps'} of {bounds.in_steps * per_step:,.1f} ms, "
            f"{seconds[None, BETWEEN] * per_step:,.1f} ms between steps; in ms a step:",
            as_text(table),
            "for all: " + ", ".join(f"{name} {ms:,.1f}" for name, ms in once if ms >= 0.05),
            *(f"step {n} failed: {step.error}" for n, step in enumerate(self.steps) if step.error),
            bounds.sentence(),
        ]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to ``path`` for https://ui.perfetto.dev or chrome://tracing.

        The file is in the trace event format (JSON), with times in microseconds. The caller, each
        replica and each replica's accelerator have a thread of complete events (``"ph": "X"``).
        """
        events = self.events()
        threads = {lane: number for number, lane in enumerate(_lanes(events))}
        rows: list[dict[str, Any]] = []
        for event in events:
            args: dict[str, Any] = {"sub_step": event.sub_step}
            if event.step:
                args |= {"step": event.step.number, "error": event.step.error}
            start, seconds = event.start - self._start, event.end - event.start
            place = {"ph": "X", "pid": 0, "tid": threads[event.lane], "ts": start * 1e6}
            name = event.name + (_ON_DEVICE if event.lane.endswith(_ON_DEVICE) else "")
            rows.append({"name": name, **place, "dur": seconds * 1e6, "args": args})
        for lane, number in threads.items():
            thread = {"ph": "M", "pid": 0, "tid": number}
            rows.append({"name": "thread_name", **thread, "args": {"name": lane}})
            rows.append({"name": "thread_sort_index", **thread, "args": {"sort_index": number}})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)

    def plot(self, axes: Any = None) -> Any:
        """Draw the step of median length with matplotlib.

        Args:
            axes: matplotlib axes to draw into; ``None`` makes a new figure.

        Returns:
            The axes.
        """
        title, events = self._picture()
        lanes = _lanes(events)
        if axes is None:
            from matplotlib import pyplot

            size = 10, 1.4 + 0.4 * len(lanes)
            _, axes = pyplot.subplots(figsize=size, layout="constrained")
        for name, colour in _COLOURS.items():
            if named := [event for event in events if event.name == name]:
                places = [lanes.index(event.lane) for event in named]
                widths = [1e3 * (event.end - event.start) for event in named]
                starts = [1e3 * event.start for event in named]
                axes.barh(places, widths, 0.7, starts, color=colour, label=name)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds since the step began")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        return axes

    def _repr_svg_(self) -> str:
        """The step of median length, and what bounds the steps, as a picture for notebooks."""
        return _svg(*self._picture(), self.bounds().sentence())

    def _picture(self) -> tuple[str, list[Event]]:
        """The step of median length: a title, and its events, in seconds since the step began."""
        if not (ended := self._ended()):
            raise ValueError("no step was recorded: call forward_backward inside of the trace")
        whole = [step for step in ended if not step.error] or ended
        step = sorted(whole, key=lambda step: step.end - step.start)[len(whole) // 2]
        rows, ms = sum(step.rows.values()), f"{(step.end - step.start) * 1e3:,.1f} ms"
        title = f"step {step.number} of {len(ended)}: {rows:,} rows in {ms}"
        events = [copy.copy(event) for event in self.events() if event.step is step]
        for event in events:
            event.start, event.end = event.start - step.start, event.end - step.start
        title += ", failed" if step.error else ""
        return title, [event for event in events if event.name in _COLOURS]


def _lanes(events: Iterable[Event]) -> list[str]:
    """The lanes of the events: the caller, the replicas, and the accelerators."""
    lanes = {
        (e.lane.endswith(_ON_DEVICE), -1 if e.replica is None else e.replica, e.lane)
        for e in events
    }
    return [lane for _, _, lane in sorted(lanes)]


def _svg(title: str, events: Sequence[Event], sentence: str) -> str:
    last = max(event.end for event in events)
    first = max(min(event.start for event in events), -last)  # a long wait is cut off
    lanes = _lanes(events)
    left = 20 + 7 * max(map(len, lanes))
    scale = (_WIDTH - left - 10) / max(last - first, 1e-9)
    bottom = 62 + _LANE * len(lanes)
    out: list[str] = []

    def text(x: float, y: float, words: str, more: str = "") -> None:
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(words)}</text>')

    def box(x: float, y: float, width: float, height: float, colour: str, label: str) -> None:
        size, label = f'width="{width:.2f}" height="{height}"', html.escape(label)
        place = f'x="{x:.2f}" y="{y:.1f}"'
        out.append(f'<rect {place} {size} fill="{colour}"><title>{label}</title></rect>')

    text(10, 20, title, 'font-weight="bold"')
    x = 10.0
    for name in (name for name in _COLOURS if any(event.name == name for event in events)):
        box(x, 32, 11, 11, _COLOURS[name], name)
        text(x + 15, 42, name)
        x += 30 + 6.4 * len(name)
    least = max((last - first) * 1e3 / 8, 1e-3)
    power = 10.0 ** math.floor(math.log10(least))
    tick = next(power * n for n in (1, 2, 5, 10) if power * n >= least * 0.999)
    for n in range(math.ceil(first * 1e3 / tick), math.floor(last * 1e3 / tick) + 1):
        at = left + (n * tick / 1e3 - first) * scale
        box(at, 56, 0.5, bottom - 56, "#b0b8bd", "")
        text(at, bottom + 14, f"{n * tick:g}" + (" ms" if not n else ""), 'text-anchor="middle"')
    for number, lane in enumerate(lanes):
        text(left - 8, 62 + _LANE * (number + 0.6), lane, 'text-anchor="end"')
    for event in events:
        label = event.name if event.sub_step is None else f"{event.name} {event.sub_step}"
        label += f": {(event.end - event.start) * 1e3:,.2f} ms"
        start = max(event.start, first)
        width = max((event.end - start) * scale - 0.4, 0.3)
        x, y = left + (start - first) * scale, 62.0 + _LANE * lanes.index(event.lane)
        box(x, y, width, _LANE - 6, _COLOURS[event.name], label)
        if event.name == BETWEEN and width > 7 * len(label):
            text(x + 6, y + 14, label)
    lines = textwrap.wrap(sentence, 140)
    for number, line in enumerate(lines):
        text(10, bottom + 40 + 17 * number, line)
    height = bottom + 44 + 17 * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" style="max-width:100%" font-family="sans-serif" font-size="12" '
        f'fill="#22282c">'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>{"".join(out)}</svg>'
    )
