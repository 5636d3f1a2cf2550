"""What a step did: the values of ``engine.last_step``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scatterpar.plan import Plan
from scatterpar.tables import Printed, as_html, as_text


@dataclass(frozen=True)
class GradientNoise:
    """How noisy one step's gradient is: the simple noise scale's two parts.

    After McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162, appendix A.1, for replicas of any sizes. Replica i has ``c_i``
    terms with the mean gradient ``g_i``; all ``C`` terms have the mean ``g``; there are
    ``n`` replicas. If a term's gradient has the mean ``G`` and the covariance ``S``,
    then ``g_i`` has the variance ``tr S / c_i`` and ``g`` has ``tr S / C``, so that ::

        sum of c_i |g_i|^2 = C |G|^2 + n tr S      (on average)
                   C |g|^2 = C |G|^2 +   tr S      (on average)

    The difference, divided by ``n - 1``, is ``V``. Its mean is ``tr S``, and ``|g|^2 -
    V / C`` has the mean ``|G|^2``. A sum of losses counts as one term per row.

    Attributes:
        signal: ``|g|^2 - V / C``, an estimate of the true gradient's squared norm. It
            may be negative in a single step.
        noise: ``V * rows / C``, an estimate of the variance of one row's gradient.
    """

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The noise scale ``noise / signal`` in rows. Much larger batches gain little.

        Infinite if the noise is positive and the signal is not; NaN if neither is
        positive. The value of a single step is very noisy;
        :class:`scatterpar.recipe.NoiseScale` averages.
        """
        if self.signal > 0:
            return self.noise / self.signal
        # Without a signal no batch is too large.
        return math.inf if self.noise > 0 else math.nan


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
        noise: with ``measure_noise=True``: how noisy the gradient is, computed from the
            differences between the replicas' gradients. NaN if there is nothing to
            compare, such as a batch of one row.
        waited: seconds from the end of the previous step to the start of this one,
            spent in the loader, the optimizer and other code of the caller. Zero for
            the first step.
        replica_seconds: for each replica, the seconds that its worker was busy.
    """

    plan: Plan
    loss: float
    seconds: dict[str, float]
    bytes: dict[str, int]
    messages: dict[str, int]
    retries: int = 0
    noise: GradientNoise | None = None
    waited: float = 0.0
    replica_seconds: tuple[float, ...] = ()

    @property
    def rows_per_second(self) -> float:
        """Rows of the batch per second of the step, without the wait before it."""
        return self.plan.rows / sum(self.seconds.values())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"

    def __str__(self) -> str:
        """The loss, then one line per phase: milliseconds, bytes, number of copies."""
        return "\n".join([self._title(), as_text(self._phases())])

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
