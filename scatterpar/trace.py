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
from scatterpar.threads.clock import Clock, RecordedStep

_BETWEEN = "between steps"
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
    """One span in a picture; times in seconds since the step began."""

    lane: int
    name: str
    start: float
    end: float
    label: str


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
        # For each accelerator, a recorded event and its time by the host's clock.
        self._zeros: dict[torch.device, tuple[torch.Event, float]] = {}

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
            self._zeros.clear()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The body is a step."""
        step = self._current = RecordedStep(time.perf_counter())
        self.steps.append(step)
        try:
            yield
        except BaseException as error:
            step.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            step.finish()
            self._end, self._current = step.end, None
            with contextlib.suppress(RuntimeError):  # of a device that failed
                self._read_devices(step)

    def clock(self, plan: Plan) -> Clock:
        """A clock for an attempt at the current step; outside of a step it records nothing."""
        if self._current is not None:
            self._current.plan = plan
        return Clock(self._current)

    def _read_devices(self, step: RecordedStep) -> None:
        """Set each span's ``on_device``, the time of its work on the device, from its events."""
        for span in step.spans:
            if len(span.marks) == 2 and span.replica is not None:
                zero, at = self._zeros[self._devices[span.replica]]
                span.marks[1].synchronize()
                start, end = (at + zero.elapsed_time(mark) / 1e3 for mark in span.marks)
                span.on_device = start, end
            span.marks = ()

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
            sizes = bounds.rows[r] / count, bounds.substeps[r] / count
            row = [f"{r}", f"{self._devices[r]}", *(f"{size:,.0f}" for size in sizes)]
            table.append(row + [f"{seconds * per_step:,.1f}" for seconds in times])
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
        threads = {0: "caller"}
        events: list[dict[str, Any]] = []

        def add(thread: int, name: str, start: float, end: float, **args: Any) -> None:
            times = {"ts": (start - self._start) * 1e6, "dur": (end - start) * 1e6}
            events.append({"ph": "X", "name": name, "pid": 0, "tid": thread, **times, "args": args})

        for number, step in enumerate(self.steps):
            add(0, "step", step.start, step.end, step=number, error=step.error)
            for span in step.spans:
                thread = 0
                args: dict[str, Any] = {"step": number, "sub_step": span.sub_step}
                if span.replica is not None:
                    thread = 1 + span.replica
                    threads[thread] = f"replica {span.replica}, {self._devices[span.replica]}"
                add(thread, span.name, span.start, span.end, **args)
                if span.on_device:
                    beside = thread + len(self._devices)
                    threads[beside] = f"{threads[thread]}: on the device"
                    add(beside, f"{span.name} on the device", *span.on_device, **args)
        for thread, name in threads.items():
            own = {"ph": "M", "pid": 0, "tid": thread}
            events.append({**own, "name": "thread_name", "args": {"name": name}})
            events.append({**own, "name": "thread_sort_index", "args": {"sort_index": thread}})
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
            width = (end - start) * 1e3
            axes.barh(lane, width, 0.7, start * 1e3, color=_COLOURS[name], edgecolor="w", lw=0.2)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds since the step began")
        axes.set_title(title, loc="left", fontsize="medium")
        used = {bar.name for bar in bars}
        keys = [patches.Patch(color=c, label=n) for n, c in _COLOURS.items() if n in used]
        where = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
        axes.legend(handles=keys, fontsize="small", **where)
        return axes

    def _picture(self) -> tuple[str, list[str], list[_Bar]]:
        """The step of median length: its title, the names of the lanes, and the bars in them."""
        if not self.steps:
            raise ValueError("no step was recorded: call forward_backward inside of the trace")
        whole = [n for n, step in enumerate(self.steps) if not step.error]
        order = sorted(whole or range(len(self.steps)), key=lambda n: self.steps[n].seconds)
        number = order[len(order) // 2]
        step, before = self.steps[number], self.steps[number - 1].end if number else self._start
        replicas = list(step.rows)
        lanes = ["caller", *(f"replica {r}, {self._devices[r]}" for r in replicas)]
        if any(span.on_device for span in step.spans):
            lanes += [f"{self._devices[r]}, of replica {r}" for r in replicas]
        shown = max(before - step.start, -step.seconds)  # the end of a wait longer than the step
        label = f"{_BETWEEN}: {(step.start - before) * 1e3:,.2f} ms"
        bars = [_Bar(0, _BETWEEN, shown, 0.0, label)]
        for span in step.spans:
            if span.name in _COLOURS:
                lane = 0 if span.replica is None else 1 + replicas.index(span.replica)
                which = span.name if span.sub_step is None else f"{span.name} {span.sub_step}"
                for start, end in filter(None, [(span.start, span.end), span.on_device]):
                    label = f"{which}: {(end - start) * 1e3:,.2f} ms"
                    bars.append(_Bar(lane, span.name, start - step.start, end - step.start, label))
                    lane += len(replicas)
        rows = step.plan.rows if step.plan else 0
        title = f"step {number} of {len(self.steps)}: {rows:,} rows in {step.seconds * 1e3:,.1f} ms"
        return f"{title}, failed" if step.error else title, lanes, bars

    def _repr_svg_(self) -> str:
        """The step of median length, and what bounds the steps, as a picture for notebooks."""
        return _svg(*self._picture(), self.bounds().sentence())


_WIDTH, _LEFT, _LANE = 960, 150, 26  # of a picture, in pixels


def _svg(title: str, lanes: Sequence[str], bars: Sequence[_Bar], sentence: str) -> str:
    first, last = min(bar.start for bar in bars), max(bar.end for bar in bars)
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
    for name in (name for name in _COLOURS if any(bar.name == name for bar in bars)):
        box(x, 32, 11, 11, _COLOURS[name])
        text(x + 15, 42, name)
        x += 30 + 6.4 * len(name)
    step = _round_step((last - first) * 1e3 / 8)
    for n in range(math.ceil(first * 1e3 / step), math.floor(last * 1e3 / step) + 1):
        at = _LEFT + (n * step / 1e3 - first) * scale
        box(at, 56, 0.5, bottom - 56, "#b0b8bd")
        text(at, bottom + 14, f"{n * step:g}" + (" ms" if not n else ""), 'text-anchor="middle"')
    for number, lane in enumerate(lanes):
        text(_LEFT - 8, 62 + _LANE * (number + 0.6), lane, 'text-anchor="end"')
    for bar in bars:
        width = max((bar.end - bar.start) * scale - 0.4, 0.3)
        x, y = _LEFT + (bar.start - first) * scale, 62.0 + _LANE * bar.lane
        box(x, y, width, _LANE - 6, _COLOURS[bar.name], bar.label)
        if bar.name == _BETWEEN and width > 7 * len(bar.label):
            text(x + 6, y + 14, bar.label)
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
