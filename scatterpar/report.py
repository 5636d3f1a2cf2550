"""What a step did: the numbers behind ``engine.last_step``."""

from __future__ import annotations

from dataclasses import dataclass

from scatterpar.plan import Plan

__all__ = ["StepReport"]


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
