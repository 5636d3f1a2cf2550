"""The report of a step: the values of ``engine.last_step``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

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
        retries: how often the step ran out of memory and was planned again.
        waited: seconds from the end of the previous step to the start of this one,
            spent in the loader, the optimizer and other code of the caller. Zero for
            the first step.
        replica_seconds: for each replica, the seconds that its worker was busy.
        graphs: how many sub-steps were replayed as graphs, or why none was; prints as
            a sentence.
        logged: the numbers that the criterion returned as ``(loss, numbers)``, of the
            whole batch.
    """

    plan: Plan
    loss: float
    seconds: dict[str, float]
    bytes: dict[str, int]
    messages: dict[str, int]
    retries: int = 0
    waited: float = 0.0
    replica_seconds: tuple[float, ...] = ()
    graphs: GraphReport = field(default_factory=GraphReport)
    logged: dict[str, float] = field(default_factory=dict)

    @property
    def rows_per_second(self) -> float:
        """Rows of the batch per second of the step, without the wait before it."""
        return self.plan.rows / sum(self.seconds.values())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"

    def __str__(self) -> str:
        """The loss and the criterion's numbers, then one line per phase: milliseconds,
        bytes, number of copies.
        """
        lines = [self._title()]
        if self.logged:
            numbers = [f"{name} {value:.6g}" for name, value in self.logged.items()]
            lines.append(f"logged: {', '.join(numbers)}")
        return "\n".join([*lines, as_text(self._phases())])

    def _repr_html_(self) -> str:
        """The phases, the replicas and the wait before the step, for notebooks."""
        waited = f"waited {_ms(self.waited)} ms for the caller"
        tables = as_html(self._phases()) + as_html(self._replicas())
        return f"<p>{self._title()}; {waited}</p>{tables}"

    def _title(self) -> str:
        count = len(self.plan.shares)
        replicas = "replica" if count == 1 else "replicas"
        return f"loss {self.loss:.6g}, {self.plan.rows} rows on {count} {replicas}"

    def _phases(self) -> list[tuple[str, ...]]:
        table: list[tuple[str, ...]] = [("phase", "ms", "bytes", "copies")]
        for phase, seconds in self.seconds.items():
            # With separators: a step copies gigabytes.
            copied_bytes = f"{self.bytes[phase]:,}"
            copies = f"{self.messages[phase]:,}"
            table.append((phase, _ms(seconds), copied_bytes, copies))
        return table

    def _replicas(self) -> list[tuple[str, ...]]:
        table: list[tuple[str, ...]] = [("replica", "device", "rows", "ms")]
        # A report that was made without seconds has no lines.
        for share, seconds in zip(self.plan.shares, self.replica_seconds, strict=False):
            replica = str(share.replica)
            rows = f"{share.rows:,}"
            table.append((replica, str(share.device), rows, _ms(seconds)))
        return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
