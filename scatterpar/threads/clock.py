"""The times of a step: seconds by phase, and, for a trace or a profiler, every part of it."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from scatterpar.devices.runtime import timed_mark
from scatterpar.devices.transfers import PHASES
from scatterpar.plan import Plan, Share
from scatterpar.torch_private import profiler_is_on

ON_DEVICES = "forward", "backward", "recompute", "replay"  # spans that launch work on devices

_NOTHING = contextlib.nullcontext()


class Span:
    """One part of a step, timed as a context manager.

    Attributes:
        name: the kind of work, such as ``"forward"``.
        replica: the number of the replica that did it; ``None`` for the caller's thread.
        sub_step: the number of the micro-batch; ``None`` if it belongs to none.
        start: when the host began, in seconds of ``time.perf_counter()``.
        end: when the host was done; on an accelerator, when all work was launched.
        own: its seconds without those of the spans inside it.
        on_device: start and end of the work on an accelerator, by the host's clock.
        elements: the number of elements of the input tensors that arrived in it.
    """

    start = end = own = 0.0
    on_device: tuple[float, float] | None = None
    marks: tuple[torch.Event, ...] = ()
    elements = 0

    def __init__(
        self,
        name: str,
        share: Share | None,
        sub_step: int | None,
        record: RecordedStep | None,
        block: contextlib.AbstractContextManager[Any] | None,
    ) -> None:
        self.name, self.sub_step = name, sub_step
        self.replica = None if share is None else share.replica
        is_launched = share is not None and record is not None and name in ON_DEVICES
        self._device = share.device if share is not None and is_launched else None
        self._record, self._block = record, block

    def __enter__(self) -> Self:
        if self._block is not None:
            self._block.__enter__()
        if self._device is not None:
            self._mark(self._device)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.end = time.perf_counter()
        if self._device is not None:
            self._mark(self._device)
        if self._record is not None:
            self._record.spans.append(self)
        if self._block is not None:
            self._block.__exit__(*error)

    def _mark(self, device: torch.device) -> None:
        if (event := timed_mark(device)) is not None:
            self.marks = *self.marks, event


@dataclass
class RecordedStep:
    """One step of a trace.

    Attributes:
        start: when it began, in seconds of ``time.perf_counter()``.
        end: when it ended.
        plan: the plan of its last attempt, if memory ran out.
        spans: its parts, in order of their starts.
        error: its exception, as text; ``None`` for a step that was committed.
    """

    start: float
    end: float = 0.0
    plan: Plan | None = None
    spans: list[Span] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.end - self.start

    @property
    def rows(self) -> dict[int, int]:
        """The number of rows by replica, for replicas that had rows."""
        return {share.replica: share.rows for share in self.plan.shares} if self.plan else {}

    def finish(self) -> None:
        """End the step: sort the spans, and set the ``own`` seconds of each."""
        self.end = time.perf_counter()
        # Not sorted in place: a worker that an interrupt left behind may still append to the list.
        self.spans = sorted(self.spans, key=lambda span: (span.start, -span.end))
        around: dict[int | None, list[Span]] = defaultdict(list)
        for span in self.spans:
            stack = around[span.replica]
            while stack and stack[-1].end <= span.start:
                stack.pop()
            span.own = span.end - span.start
            if stack:
                stack[-1].own -= span.own
            stack.append(span)


class Clock:
    """Times the phases of a step, and the parts of sub-steps.

    With a ``record``, every part of the step is appended to it. While a torch profiler is on, every
    part is also a ``record_function`` block. Otherwise only phases are timed. ``passes`` has, for
    each time that the replicas ran, the start and end of each replica's work.
    """

    def __init__(self, record: RecordedStep | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.passes: list[dict[int, tuple[float, float]]] = []  # by number of the replica
        self._record = record
        self._is_profiled = profiler_is_on()
        self.is_idle = record is None and not self._is_profiled

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
        block = None
        if self._is_profiled:
            label = f"scatterpar {name}" if sub_step is None else f"scatterpar {name} {sub_step}"
            block = torch.profiler.record_function(label)
        return Span(name, share, sub_step, self._record, block)


SILENT = Clock()  # records nothing: for sub-steps outside of the step, such as warm-up
