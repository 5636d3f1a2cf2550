"""The report of a step: the values of ``engine.last_step``."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from scatterpar.devices.clocks import device_waited
from scatterpar.devices.memory import is_half_full, most_allocated_bytes
from scatterpar.devices.streams import has_streams
from scatterpar.hints import StepTraits, hint_for
from scatterpar.plan import Plan
from scatterpar.tables import Printed, as_html, as_text


class GraphReport(str):
    """What became of sub-steps as graphs; prints as a sentence, which is its text.

    Attributes:
        replayed: the number of sub-steps that were replayed.
        total: the number of sub-steps of all replicas.
        why: why none was; empty if a step ran with graphs.
    """

    replayed: int
    total: int
    why: str

    def __new__(cls, replayed: int = 0, total: int = 0, why: str = "") -> Self:
        """A text, because programs search it for words."""
        text = f"eager: {why}" if why else f"{replayed} of {total} sub-steps replayed"
        report = super().__new__(cls, text)
        report.replayed = replayed
        report.total = total
        report.why = why
        return report

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For copies: ``str`` would pass its text."""
        return self.replayed, self.total, self.why


# A step without a check takes less to find that none is due.
_SHOWN_SECONDS = 1e-3


@dataclass(frozen=True)
class StepReport(Printed):
    """Counts and times of one step; ``print`` shows a table.

    Attributes:
        plan: the shares and micro-batches.
        loss: the loss of the whole batch.
        seconds: wall time by phase: ``scatter``, ``replicate``, ``compute``,
            ``reduce``.
        bytes: bytes copied from one memory to another, by phase.
        messages: copies from one memory to another, by phase.
        check_seconds: the part of ``compute`` that the check before the step took; zero
            in most steps.
        retries: how often the step ran out of memory and was planned again.
        waited: seconds from the end of the previous step to the start of this one,
            spent in the loader, the optimizer and other code of the caller. Zero for
            the first step.
        replica_seconds: for each replica, the seconds that its worker was busy.
        device_seconds: for each replica, the seconds from the beginning of its share's
            first kernel to the end of its last; empty for two passes.
        graphs: how many sub-steps were replayed as graphs, or why none was; prints as
            a sentence.
        logged: the numbers that the criterion returned as ``(loss, numbers)``, of the
            whole batch.
        launch_seconds: for each replica, the seconds in which its thread launched its
            share.
        graphs_are_off: whether ``graphs=False`` is why there are none.
        may_still_capture: whether later sub-steps become graphs if devices go on
            waiting for the host.
        is_compiled: whether replicas run compiled.
    """

    plan: Plan
    loss: float
    seconds: dict[str, float]
    bytes: dict[str, int]
    messages: dict[str, int]
    retries: int = 0
    waited: float = 0.0
    replica_seconds: tuple[float, ...] = ()
    device_seconds: tuple[float, ...] = ()
    graphs: GraphReport = field(default_factory=GraphReport)
    logged: dict[str, float] = field(default_factory=dict)
    check_seconds: float = 0.0
    launch_seconds: tuple[float, ...] = ()
    graphs_are_off: bool = False
    may_still_capture: bool = False
    is_compiled: bool = False

    @property
    def rows_per_second(self) -> float:
        """Rows of the batch per second of the step, without the wait before it."""
        return self.plan.rows / sum(self.seconds.values())

    @property
    def idle(self) -> tuple[float, ...]:
        """For each replica, the part of the step for which its device had no share."""
        total = sum(self.seconds.values())
        return tuple(max(0.0, 1 - seconds / total) for seconds in self.device_seconds)

    @property
    def hint(self) -> str:
        """What would make the step faster; empty if nothing is worth a hint."""
        if not self.device_seconds:
            return ""
        # Most steps have no check, so the hint is of such a step.
        seconds = sum(self.seconds.values()) - self.check_seconds
        shares = self.plan.shares
        num_substeps = max(len(share.micro_batches) for share in shares)
        devices = {share.device for share in shares}
        traits = StepTraits(
            serial=1 - max(self.device_seconds) / seconds,
            waits_for_host=self._devices_wait(num_substeps),
            graphs_are_off=self.graphs_are_off,
            may_still_capture=self.may_still_capture,
            is_compiled=self.is_compiled,
            num_devices=len(devices),
            num_substeps=num_substeps,
            has_room=not any(map(is_half_full, devices)),
        )
        return hint_for(traits)

    def _devices_wait(self, num_substeps: int) -> bool:
        """Whether each device has waited for the host to launch its sub-steps."""
        for share in self.plan.shares:
            # Such a device is done when the host is.
            if not has_streams(share.device):
                return False
        for working, launching in zip(
            self.device_seconds, self.launch_seconds, strict=True
        ):
            if not device_waited(working, launching, num_substeps):
                return False
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"

    def __str__(self) -> str:
        """The loss, the speed, and the criterion's numbers; one line per phase and one
        per replica; what became of graphs, and the hint.
        """
        lines = [self._title(), self._speed()]
        if self.logged:
            numbers = [f"{name} {value:.6g}" for name, value in self.logged.items()]
            lines.append(f"logged: {', '.join(numbers)}")
        lines += ["", as_text(self._phases())]
        if self.replica_seconds:
            lines += ["", as_text(self._replicas())]
        if self.graphs.total:
            lines += ["", f"graphs: {self.graphs}"]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The phases, the replicas and the wait before the step, for notebooks."""
        waited = f"waited {_ms(self.waited)} ms for the caller"
        tables = as_html(self._phases()) + as_html(self._replicas())
        lines = [f"{self._title()}; {waited}", self._speed()]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        paragraphs = [f"<p>{html.escape(line)}</p>" for line in lines]
        return "".join([*paragraphs, tables])

    def _title(self) -> str:
        count = len(self.plan.shares)
        replicas = "replica" if count == 1 else "replicas"
        return f"loss {self.loss:.6g}, {self.plan.rows} rows on {count} {replicas}"

    def _speed(self) -> str:
        """Rows per second, and the part of the step that is serial."""
        words = [f"{self.rows_per_second:,.0f} rows per second"]
        if self.device_seconds:
            words.append(f"no replica computes in {min(self.idle):.0%} of the step")
        if self.check_seconds >= _SHOWN_SECONDS:
            words.append(f"the check before it took {_ms(self.check_seconds)} ms")
        return "; ".join(words)

    def _phases(self) -> list[tuple[str, ...]]:
        table: list[tuple[str, ...]] = [("phase", "ms", "bytes", "copies")]
        for phase, seconds in self.seconds.items():
            # With separators: a step copies gigabytes.
            copied_bytes = f"{self.bytes[phase]:,}"
            copies = f"{self.messages[phase]:,}"
            table.append((phase, _ms(seconds), copied_bytes, copies))
        return table

    def _replicas(self) -> list[tuple[str, ...]]:
        has_times = bool(self.device_seconds)
        title = ("replica", "device", "rows", "ms")
        table: list[tuple[str, ...]] = [
            (*title, "busy", "idle", "most memory") if has_times else title
        ]
        # A report that was made without seconds has no lines.
        for share, seconds in zip(self.plan.shares, self.replica_seconds, strict=False):
            replica = str(share.replica)
            cells: tuple[str, ...]
            cells = (replica, str(share.device), f"{share.rows:,}", _ms(seconds))
            if has_times:
                idle = self.idle[share.replica]
                memory = _memory(share.device)
                cells = (*cells, f"{1 - idle:.0%}", f"{idle:.0%}", memory)
            table.append(cells)
        return table


def _memory(device: torch.device) -> str:
    """The most memory that torch has given out on a device so far."""
    num_bytes = most_allocated_bytes(device)
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes else "unknown"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
