"""``engine.trace()``: what each replica did when in a step, as a table, a picture and a file."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from scatterpar.bounds import Bounds
from scatterpar.devices.runtime import timed_mark
from scatterpar.plan import Plan
from scatterpar.report import as_text
from scatterpar.threads.clock import Clock, RecordedStep, Zero

_CALLER, _BETWEEN, _ON_DEVICE = "caller", "between steps", " on the device"
_COLOURS = {  # in the order of the columns and of the legend
    _BETWEEN: "#e3e7ea",
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


class _Bar(NamedTuple):
    """One span, or its work on a device, in the lane of a thread or device."""

    lane: str
    name: str
    start: float
    end: float
    sub_step: int | None = None


class Trace:
    """The steps of an engine, recorded by ``engine.trace()``.

    ``print`` shows a table with a row per replica, in milliseconds per step, and a sentence that
    says what bounds the steps and what to pass. A notebook shows a picture of one step.

    Attributes:
        steps: the recorded steps, in order.
    """

    def __init__(self, devices: Sequence[torch.device], options: frozenset[str]) -> None:
        self.steps: list[RecordedStep] = []
        self._devices, self._options = devices, options
        self._current: RecordedStep | None = None
        self._start = self._end = 0.0
        self._zeros: dict[torch.device, Zero] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Time the body, in which steps are recorded."""
        for device in self._devices:
            if (event := timed_mark(device)) is not None:
                event.synchronize()
                self._zeros[device] = event, time.perf_counter()
        self._start = self._end = time.perf_counter()
        try:
            yield
        finally:
            self._end = time.perf_counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The body is a step."""
        step = self._current = RecordedStep(time.perf_counter(), self._zeros)
        self.steps.append(step)
        try:
            yield
        except BaseException as error:
            step.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            step.end = self._end = time.perf_counter()
            self._current = None

    def clock(self, plan: Plan) -> Clock:
        """A clock for an attempt at the current step; outside of a step it records nothing."""
        if self._current is not None:
            self._current.plan = plan
        return Clock(self._current)

    def bounds(self) -> Bounds:
        """The times of all recorded steps, summed, and what bounds them."""
        return Bounds(self.steps, self._end - self._start, self._devices, self._options)

    def __str__(self) -> str:
        """A table with a row per replica, the phases, and what bounds the steps."""
        if not self.steps:
            return "No step was recorded."
        bounds, count = self.bounds(), len(self.steps)
        per_step = 1e3 / count
        names = [n for n in _COLOURS if any(bounds.of(r, n) for r in bounds.replicas)]
        on_device = bounds.on_devices()
        table = [["replica", "device", "rows", "sub-steps", *names, "idle"]]
        table[0] += ["on device"] if on_device else []
        for r in bounds.replicas:
            times = [bounds.of(r, name) for name in names]
            times.append(max(0.0, bounds.computing - sum(times)))
            times += [on_device.get(r, 0.0)] if on_device else []
            sizes = (f"{size / count:,.0f}" for size in (bounds.rows[r], bounds.substeps[r]))
            shown = (f"{seconds * per_step:,.1f}" for seconds in times)
            table.append([f"{r}", f"{self._devices[r]}", *sizes, *shown])
        once = [(name, bounds.of(None, name) * per_step) for name in _COLOURS]
        lines = [
            f"{count} {'step' if count == 1 else 'steps'} of {bounds.in_steps * per_step:,.1f} ms, "
            f"{(bounds.total - bounds.in_steps) * per_step:,.1f} ms between steps; in ms a step:",
            as_text(table),
            "for all: " + ", ".join(f"{name} {ms:,.1f}" for name, ms in once if ms >= 0.05),
            *(f"step {n} failed: {step.error}" for n, step in enumerate(self.steps) if step.error),
            bounds.sentence(),
        ]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to ``path`` for https://ui.perfetto.dev or chrome://tracing.

        The file is in the trace event format (JSON), with times in microseconds. The caller, each
        replica and each replica's accelerator have a thread. Each span is a complete event.
        """
        events: list[dict[str, Any]] = []
        threads = {lane: number for number, lane in enumerate(self._lanes())}
        for number, step in enumerate(self.steps):
            whole = _Bar(_CALLER, "step", step.start, step.end)
            for lane, name, start, end, sub_step in [whole, *self._bars(step)]:
                name += _ON_DEVICE if lane.endswith(_ON_DEVICE) else ""
                times = {"ts": (start - self._start) * 1e6, "dur": (end - start) * 1e6}
                args = {"step": number, "sub_step": sub_step, "error": step.error}
                event = {"ph": "X", "name": name, "pid": 0, "tid": threads[lane]}
                events.append({**event, **times, "args": args})
        for lane, thread in threads.items():
            event = {"ph": "M", "pid": 0, "tid": thread}
            events.append({**event, "name": "thread_name", "args": {"name": lane}})
            events.append({**event, "name": "thread_sort_index", "args": {"sort_index": thread}})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def plot(self, axes: Any = None) -> Any:
        """Draw the step of median length with matplotlib.

        Args:
            axes: matplotlib axes to draw into; ``None`` makes a new figure.

        Returns:
            The axes.
        """
        from matplotlib import patches, pyplot

        title, lanes, bars = self._picture()
        if axes is None:
            size = 10, 1.4 + 0.4 * len(lanes)
            _, axes = pyplot.subplots(figsize=size, layout="constrained")
        for lane, name, start, end, _ in bars:
            place = lanes.index(lane), (end - start) * 1e3, 0.7, start * 1e3
            axes.barh(*place, color=_COLOURS[name], edgecolor="w", lw=0.2)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds since the step began")
        axes.set_title(title, loc="left", fontsize="medium")
        keys = [patches.Patch(color=_COLOURS[name], label=name) for name in _names(bars)]
        axes.legend(handles=keys, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        return axes

    def _lanes(self) -> list[str]:
        """The caller, the replicas, and the accelerators."""
        replicas = [f"replica {r}, {device}" for r, device in enumerate(self._devices)]
        return [_CALLER, *replicas, *(lane + _ON_DEVICE for lane in replicas if self._zeros)]

    def _bars(self, step: RecordedStep) -> Iterator[_Bar]:
        lanes = self._lanes()
        for span in step.spans:
            lane = lanes[0 if span.replica is None else 1 + span.replica]
            yield _Bar(lane, span.name, span.start, span.end, span.sub_step)
            if span.on_device:
                yield _Bar(lane + _ON_DEVICE, span.name, *span.on_device, span.sub_step)

    def _picture(self) -> tuple[str, list[str], list[_Bar]]:
        """The step of median length: its title, lanes, and bars, in seconds since it began."""
        if not self.steps:
            raise ValueError("no step was recorded: call forward_backward inside of the trace")
        whole = [n for n, step in enumerate(self.steps) if not step.error]
        order = sorted(whole or range(len(self.steps)), key=lambda n: self.steps[n].seconds)
        number = order[len(order) // 2]
        step, before = self.steps[number], self.steps[number - 1].end if number else self._start
        bars = [_Bar(_CALLER, _BETWEEN, before, step.start), *self._bars(step)]
        bars = [
            bar._replace(start=bar.start - step.start, end=bar.end - step.start)
            for bar in bars
            if bar.name in _COLOURS
        ]
        used = {bar.lane for bar in bars}
        rows = step.plan.rows if step.plan else 0
        title = f"step {number} of {len(self.steps)}: {rows:,} rows in {step.seconds * 1e3:,.1f} ms"
        title += ", failed" if step.error else ""
        return title, [lane for lane in self._lanes() if lane in used], bars

    def _repr_svg_(self) -> str:
        """The step of median length, and what bounds the steps, as a picture for notebooks."""
        return _svg(*self._picture(), self.bounds().sentence())


def _names(bars: Sequence[_Bar]) -> list[str]:
    """The names of the bars, in the order of the legend."""
    return [name for name in _COLOURS if any(bar.name == name for bar in bars)]


_WIDTH, _LEFT, _LANE = 960, 150, 26  # of a picture, in pixels


def _svg(title: str, lanes: Sequence[str], bars: Sequence[_Bar], sentence: str) -> str:
    last = max(bar.end for bar in bars)
    first = max(min(bar.start for bar in bars), -last)  # a long wait is cut off
    scale = (_WIDTH - _LEFT - 10) / max(last - first, 1e-9)
    bottom = 62 + _LANE * len(lanes)
    out: list[str] = []

    def text(x: float, y: float, words: str, more: str = "") -> None:
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(words)}</text>')

    def box(x: float, y: float, width: float, height: float, colour: str, label: str = "") -> None:
        label = f"<title>{html.escape(label)}</title>" if label else ""
        size = f'width="{width:.2f}" height="{height}" fill="{colour}"'
        out.append(f'<rect x="{x:.2f}" y="{y:.1f}" {size}>{label}</rect>')

    text(10, 20, title, 'font-weight="bold"')
    x = 10.0
    for name in _names(bars):
        box(x, 32, 11, 11, _COLOURS[name])
        text(x + 15, 42, name)
        x += 30 + 6.4 * len(name)
    tick = _round_step((last - first) * 1e3 / 8)
    for n in range(math.ceil(first * 1e3 / tick), math.floor(last * 1e3 / tick) + 1):
        at = _LEFT + (n * tick / 1e3 - first) * scale
        box(at, 56, 0.5, bottom - 56, "#b0b8bd")
        text(at, bottom + 14, f"{n * tick:g}" + (" ms" if not n else ""), 'text-anchor="middle"')
    for number, lane in enumerate(lanes):
        text(_LEFT - 8, 62 + _LANE * (number + 0.6), lane, 'text-anchor="end"')
    for lane, name, start, end, sub_step in bars:
        label = name if sub_step is None else f"{name} {sub_step}"
        label += f": {(end - start) * 1e3:,.2f} ms"
        start = max(start, first)
        width = max((end - start) * scale - 0.4, 0.3)
        x, y = _LEFT + (start - first) * scale, 62.0 + _LANE * lanes.index(lane)
        box(x, y, width, _LANE - 6, _COLOURS[name], label)
        if name == _BETWEEN and width > 7 * len(label):
            text(x + 6, y + 14, label)
    lines = textwrap.wrap(sentence, 140)
    for number, line in enumerate(lines):
        text(10, bottom + 40 + 17 * number, line)
    height = bottom + 44 + 17 * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" font-family="sans-serif" font-size="12" fill="#22282c">'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>{"".join(out)}</svg>'
    )


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-3)))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * 0.999)
