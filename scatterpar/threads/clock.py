"""The times of a step: seconds by phase and, for a trace or a profiler, one event per part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Self

import torch

from scatterpar.devices.runtime import timed_mark
from scatterpar.devices.transfers import PHASES
from scatterpar.plan import Plan, Share
from scatterpar.torch_private import profiler_is_on

ON_DEVICES = "forward", "backward", "recompute", "replay"  # events that launch work on devices
Zero = tuple[torch.Event, float]  # an event of an accelerator, and its time by the host's clock

_NOTHING = contextlib.nullcontext()


class Event:
    """One part of a step: a context manager that times its body and adds itself to ``step``.

    Attributes:
        step: the step that recorded it; ``None`` if only a profiler sees it.
        name: the kind of work, such as ``"forward"``.
        replica: the number of the replica that did it; ``None`` for the caller's thread.
        sub_step: the number of the micro-batch; ``None`` if it belongs to none.
        start: when the host began, in seconds of ``time.perf_counter()``.
        end: when the host was done; on an accelerator, when all work was launched.
        self_seconds: the seconds of the event without those of the events inside it.
        elements: the number of elements of the input tensors that arrived during the event.
        lane: the replica, its device, or the caller's thread, as a trace calls it.
    """

    start = end = self_seconds = 0.0
    elements = 0
    replica: int | None = None
    lane = "caller"
    _device: torch.device | None = None  # an accelerator that the event launches work on
    _outer: Event | None = None  # the event that this one is inside of

    def __init__(
        self,
        step: RecordedStep | None,
        name: str,
        share: Share | None = None,
        sub_step: int | None = None,
    ) -> None:
        self.step, self.name, self.sub_step = step, name, sub_step
        self._marks: list[torch.Event] = []
        if share is not None:
            self.replica, self.lane = share.replica, f"replica {share.replica}, {share.device}"
            if step is not None and share.device in step.zeros and name in ON_DEVICES:
                self._device = share.device

    def __enter__(self) -> Self:
        if self.step is not None:
            self._outer = self.step.innermost.get(self.replica)
            self.step.innermost[self.replica] = self
        if self._device is not None:
            self._marks.append(timed_mark(self._device))
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end = time.perf_counter()
        self.self_seconds += self.end - self.start
        if self._device is not None:
            self._marks.append(timed_mark(self._device))
        if self.step is not None:
            self.step.innermost[self.replica] = self._outer
            self.step.events.append(self)
        if self._outer is not None:
            self._outer.self_seconds -= self.end - self.start

    @cached_property
    def on_device(self) -> tuple[float, float] | None:
        """Start and end of the work on an accelerator, by the host's clock; else ``None``."""
        if self.step is None or self._device is None:
            return None
        zero, at = self.step.zeros[self._device]
        before, after = self._marks
        with contextlib.suppress(RuntimeError):  # of a device that failed
            after.synchronize()
            return at + zero.elapsed_time(before) / 1e3, at + zero.elapsed_time(after) / 1e3
        return None

    @property
    def seconds(self) -> float:
        """The seconds of work: on the device if that is an accelerator, else ``self_seconds``."""
        return self.on_device[1] - self.on_device[0] if self.on_device else self.self_seconds


class RecordedStep(Event):
    """One step of a trace: an event, ``"step"``, with the events inside it.

    Attributes:
        number: the number of the step in the trace, from 0.
        plan: the plan of the last attempt. There are several attempts if memory runs out.
        error: the exception as text; ``None`` for a step that was committed.
        events: the parts in order of their ends, and the step itself.
        zeros: for each accelerator with streams, an event and its time by the host's clock.
        innermost: by replica, the innermost event that has not ended.
    """

    plan: Plan | None = None
    error: str | None = None

    def __init__(self, number: int = 0, zeros: Mapping[torch.device, Zero] | None = None) -> None:
        super().__init__(self, "step")
        self.number, self.zeros = number, zeros or {}
        self.events: list[Event] = []
        self.innermost: dict[int | None, Event | None] = {}

    def __exit__(self, *raised: Any) -> None:
        self.error = f"{raised[0].__name__}: {raised[1]}" if raised[0] else None
        super().__exit__(*raised)

    @property
    def rows(self) -> dict[int, int]:
        """The number of rows by replica, for replicas that had rows."""
        return {share.replica: share.rows for share in self.plan.shares} if self.plan else {}


class Clock:
    """Times the phases of a step, and the parts of sub-steps.

    If there is a ``step``, every part is an event of it. While a torch profiler is on, every part
    is also a ``record_function`` block. Otherwise only phases are timed. ``replica_spans`` has, for
    each time that the replicas ran, the start and end of each replica's work.
    """

    def __init__(self, step: RecordedStep | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.replica_spans: list[dict[int, tuple[float, float]]] = []  # by number of the replica
        self._step = step
        self._is_profiled = profiler_is_on()
        self.is_idle = step is None and not self._is_profiled

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as part of phase ``name``."""
        start = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def span(
        self, name: str, share: Share | None = None, sub_step: int | None = None
    ) -> contextlib.AbstractContextManager[Event | None]:
        """Times the body as a part of the step, by the caller or by the replica of ``share``."""
        if self.is_idle:
            return _NOTHING
        event = Event(self._step, name, share, sub_step)
        return _in_block(event) if self._is_profiled else event


@contextlib.contextmanager
def _in_block(event: Event) -> Iterator[Event]:
    label = event.name if event.sub_step is None else f"{event.name} {event.sub_step}"
    with torch.profiler.record_function(f"scatterpar {label}"), event:
        yield event


SILENT = Clock()  # records nothing: for sub-steps outside of the step, such as warm-up
