"""What a step computed, before anything of the user's is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.devices.verbs import physical
from scatterpar.plan import Plan
from scatterpar.replicas.buffers import BufferValue, Layer
from scatterpar.report import GradientNoise, StepReport
from scatterpar.step.noise import Spread, estimate
from scatterpar.threads.workers import Attempt

__all__ = ["Computed", "Gradient", "Outcome", "Result"]

Gradient = tuple[Tensor, "Tensor | None"]  # a leaf of the user's, and what it is given


@dataclass
class Result:
    """What one replica made of its share.

    Attributes:
        loss: its part of the whole batch's loss: the weighted sum over its micro-batches.
        dtype: the dtype of the losses.
        outputs: the module's outputs, detached and joined, where they were asked for.
    """

    loss: float = 0.0
    dtype: torch.dtype = torch.float32
    outputs: Any = None


class Computed(NamedTuple):
    """What the replicas made of their shares, beside the gradients that they hold.

    Attributes:
        results: of each replica.
        past: leaves of the user's that gradients came to past the replicas, and these.
    """

    results: list[Result]
    past: list[Gradient]


@dataclass
class Outcome:
    """What a step computed: everything that is to be committed, and its report.

    Attributes:
        plan: the shares and micro-batches.
        loss: the loss of the whole batch.
        dtype: the dtype of the losses.
        is_mean: the loss is a mean of ``terms``, not a sum.
        terms: how many terms the loss is made of.
        scale: the gradient scaler's factor.
        spread: how far the replicas' gradients lie apart, where that was asked for.
        outputs: one entry per replica, where they were asked for.
        gradients: every trained tensor of the user's, and its gradient if any replica used it.
        buffers: the dict that holds a buffer of the user's, its name, and its new value.
        layers: the batch normalisations whose statistics move once a step.
        attempt: the random numbers of the step, what was copied, and what it took.
        retries: how many tries before it ran out of memory.
    """

    plan: Plan
    loss: float
    dtype: torch.dtype
    is_mean: bool
    terms: float
    scale: float
    spread: Spread
    outputs: tuple[Any, ...]
    gradients: list[Gradient]
    buffers: list[BufferValue]
    layers: list[Layer]
    attempt: Attempt
    retries: int = 0

    def noise(self) -> GradientNoise:
        """What the spread of the replicas' gradients says, before the commit uses these up."""
        gradients = [gradient for _, gradient in self.gradients if gradient is not None]
        factor = self.scale * (1.0 if self.is_mean else self.spread.terms)
        with self.attempt:
            return estimate(self.spread, gradients, factor)

    def returned(self) -> Tensor:
        """The loss on the master: filled in, not copied, since the host waits for a copy."""
        with self.attempt:
            device = physical(self.plan.shares[0].device)
            return torch.full((), self.loss, dtype=self.dtype, device=device)

    def report(self, noise: GradientNoise | None) -> StepReport:
        """What the step did, in numbers."""
        clock, ledger = self.attempt.clock, self.attempt.ledger
        return StepReport(
            self.plan,
            self.loss,
            clock.seconds,
            ledger.bytes,
            ledger.messages,
            self.retries,
            noise,
        )
