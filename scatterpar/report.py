"""What a step did: the numbers behind ``engine.last_step``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from scatterpar.devices import PHASES
from scatterpar.plan import Plan

__all__ = ["Clock", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """What one step did. Counted and timed where the work happens.

    Attributes:
        plan: the shares and micro-batches.
        loss: the loss of the whole batch.
        seconds: wall time by phase: ``scatter``, ``replicate``, ``compute``, ``reduce``.
        bytes: bytes copied from one memory to another, by phase.
        messages: copies from one memory to another, by phase.
        retries: how often the step ran out of memory and was planned anew.
    """

    plan: Plan
    loss: float
    seconds: dict[str, float]
    bytes: dict[str, int]
    messages: dict[str, int]
    retries: int = 0


class Clock:
    """Wall time by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as part of phase ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
