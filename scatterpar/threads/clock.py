"""The times of a step: seconds by phase and, for a trace or a profiler, the times of every part."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Self

import torch

from scatterpar.devices.runtime import timed_mark
from scatterpar.devices.transfers import PHASES
from scatterpar.plan import Plan, Share
from scatterpar.torch_private import profiler_is_on

ON_DEVICES = "forward", "backward", "recompute", "replay"  # spans that launch work on devices
Zero = tuple[torch.Event, float]  # an event of an accelerator, and its time by the host's clock

_NOTHING = contextlib.nullcontext()


class Span:
    """One part of a step, timed as a context manager.

    Attributes:
        name: the kind of work, such as ``"forward"``.
        replica: the number of the replica that did it; ``None`` for the caller's thread.
        sub_step: the number of the micro-batch; ``None`` if it belongs to none.
        start: when the host began, in seconds of ``time.perf_counter()``.
        end: when the host was done; on an accelerator, when all work was launched.
        own: the seconds of the span without those of the spans inside it.
        elements: the number of elements of the input tensors that arrived during the span.
    """

    start = end = own = 0.0
    elements = 0
    _zero: Zero | None = None
    _device: torch.device | None = None
    _before: torch.Event | None = None
    _after: torch.Event | None = None

    def __init__(
        self, name: str, share: Share | None, sub_step: int | None, step: RecordedStep | None
    ) -> None:
        self.name, self.sub_step = name, sub_step
        self.replica = None if share is None else share.replica
        self._step = step
        if step is not None and step.zeros and share is not None and name in ON_DEVICES:
            self._zero, self._device = step.zeros.get(share.device), share.device

    def __enter__(self) -> Self:
        self._before = timed_mark(self._device)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.end = time.perf_counter()
        self._after = timed_mark(self._device)
        if self._step is not None:
            self._step.recorded.append(self)

    @cached_property
    def on_device(self) -> tuple[float, float] | None:
        """Start and end of the work on an accelerator, by the host's clock; else ``None``."""
        if self._zero is None or self._before is None or self._after is None:
            return None
        (event, at), start, end = self._zero, self._before, self._after
        with contextlib.suppress(RuntimeError):  # of a device that failed
            end.synchronize()
            return at + event.elapsed_time(start) / 1e3, at + event.elapsed_time(end) / 1e3
        return None


class RecordedStep:
    """One step of a trace.

    Attributes:
        start: when it began, in seconds of ``time.perf_counter()``.
        end: when it ended.
        plan: the plan of its last attempt. There are several attempts if memory runs out.
        error: its exception, as text; ``None`` for a step that was committed.
        recorded: its spans, in order of their ends.
        zeros: for each accelerator, an event and its time.
    """

    def __init__(self, start: float, zeros: Mapping[torch.device, Zero] | None = None) -> None:
        self.start, self.end = start, start
        self.plan: Plan | None = None
        self.error: str | None = None
        self.recorded: list[Span] = []
        self.zeros = zeros or {}

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.end - self.start

    @property
    def rows(self) -> dict[int, int]:
        """The number of rows by replica, for replicas that had rows."""
        return {share.replica: share.rows for share in self.plan.shares} if self.plan else {}

    @cached_property
    def spans(self) -> list[Span]:
        """The parts of the step in order of their starts. Read it after the step has ended."""
        # A copy: an abandoned worker may still append to the list.
        spans = sorted(self.recorded, key=lambda span: (span.start, -span.end))
        around: dict[int | None, list[Span]] = defaultdict(list)
        for span in spans:
            stack = around[span.replica]
            while stack and stack[-1].end <= span.start:
                stack.pop()
            span.own = span.end - span.start
            if stack:
                stack[-1].own -= span.own
            stack.append(span)
        return spans


class Clock:
    """Times the phases of a step, and the parts of sub-steps.

    If there is a ``step``, every part is recorded in it. While a torch profiler is on, every part
    is also a ``record_function`` block. Otherwise only phases are timed. ``passes`` has, for
    each time that the replicas ran, the start and end of each replica's work.
    """

    def __init__(self, step: RecordedStep | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.passes: list[dict[int, tuple[float, float]]] = []  # by number of the replica
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
    ) -> contextlib.AbstractContextManager[Span | None]:
        """Times the body as a part of the step, by the caller or by the replica of ``share``."""
        if self.is_idle:
            return _NOTHING
        span = Span(name, share, sub_step, self._step)
        return _in_block(span) if self._is_profiled else span


@contextlib.contextmanager
def _in_block(span: Span) -> Iterator[Span]:
    label = span.name if span.sub_step is None else f"{span.name} {span.sub_step}"
    with torch.profiler.record_function(f"scatterpar {label}"), span:
        yield span


SILENT = Clock()  # records nothing: for sub-steps outside of the step, such as warm-up
