"""What a step computed, before anything of the user's is touched; the gradient's noise in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.devices.runtime import physical
from scatterpar.plan import Plan
from scatterpar.replicas.buffers import BatchNormUpdate, BufferValue, BufferWriter
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.report import GradientNoise, StepReport, warn
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import LossWeights
from scatterpar.step.request import Request

Gradient = tuple[Tensor, "Tensor | None"]  # a leaf of the user's, and what it is given


@dataclass
class Result:
    """What one replica made of its share."""

    loss: float = 0.0  # its part of the batch's: the weighted sum over its micro-batches
    dtype: torch.dtype = torch.float32  # of the losses
    outputs: Any = None  # the module's, detached, where they were asked for; joined at the end


class Computed(NamedTuple):
    """What the replicas made of their shares, beside the gradients that they hold."""

    results: list[Result]
    external_gradients: list[Gradient]  # what came to leaves of the user's past the replicas
    moved: set[int]  # ids of the user's buffers that the criterion has written


@dataclass(frozen=True)
class Spread:
    """How far the replicas' gradients lie apart."""

    squares: float = 0.0  # the sum of terms times the squared norm of their mean; NaN: unknown
    replicas: float = 0  # how many had terms
    terms: float = 0  # how many all of them had; rows, where the loss is a sum
    rows: float = 0  # of the batch


@dataclass
class Outcome:
    """What a step computed: everything that is to be committed, and its report."""

    plan: Plan
    loss: float  # of the whole batch
    dtype: torch.dtype  # of the losses
    is_mean: bool  # the loss is a mean of the terms, not a sum
    needs_terms: bool  # the loss is torch's mean, which is NaN without terms
    check_finite: bool
    terms: float  # how many there are
    scale: float  # the gradient scaler's factor
    spread: Spread  # of the replicas' gradients, where that was asked for
    outputs: tuple[Any, ...]  # of each replica, where they were asked for
    gradients: list[Gradient]  # of every trained tensor of the user's
    buffers: list[BufferValue]
    layers: list[BatchNormUpdate]  # batch normalisations whose statistics move once a step
    attempt: Attempt
    buffer_writers: Sequence[BufferWriter] = ()  # of these buffers, if prepared before the step
    retries: int = 0  # tries before it that ran out of memory

    def noise(self) -> GradientNoise:
        """What the spread of the replicas' gradients says, before the commit uses these up."""
        gradients = [gradient for _, gradient in self.gradients if gradient is not None]
        factor = self.scale * (1.0 if self.is_mean else self.spread.terms)
        return _estimate(self.spread, gradients, factor)

    def returned(self) -> Tensor:
        """The loss on the master: filled in, not copied, since the host waits for a copy."""
        if self.needs_terms and not self.terms:
            text = "no label of this batch counts: all are ignored, and torch's mean of none is NaN"
            if self.check_finite:
                raise FloatingPointError(f"{text}; nothing was changed")
            warn(f"{text}; here the loss is 0, and nothing is added to gradients")
        device = physical(self.plan.shares[0].device)
        return torch.full((), self.loss, dtype=self.dtype, device=device)

    def report(self, noise: GradientNoise | None, waited: float) -> StepReport:
        """The report of the step, which began ``waited`` seconds after the previous one."""
        clock, transfers = self.attempt.clock, self.attempt.transfers
        counted = clock.seconds, transfers.bytes, transfers.messages
        of_replicas = [0.0] * len(self.plan.shares)
        for spans in clock.passes:
            for replica, (start, end) in spans.items():
                of_replicas[replica] += end - start
        of_step = self.plan, self.loss, *counted, self.retries, noise
        return StepReport(*of_step, waited=waited, replica_seconds=tuple(of_replicas))


def measure(
    request: Request,
    parts: Sequence[ReplicaSet],
    plan: Plan,
    weights: LossWeights,
    external: Sequence[Gradient],
) -> Spread:
    """The spread of the replicas' gradients, before they are added up."""
    terms = weights.terms
    if request.is_mean:
        counts = [sum(own) * terms for own in weights.by_share]
        added = [request.scale * sum(own) for own in weights.by_share]
    else:
        counts = [float(share.rows) for share in plan.shares]
        added = [request.scale * count for count in counts]
        terms = sum(counts)
    squares = [
        count * _squared_norm(_gradients_of(parts, replica)) / factor**2
        for replica, (count, factor) in enumerate(zip(counts, added, strict=True))
        if count
    ]
    # A criterion that closes over parameters writes their gradients directly, not on replicas.
    is_whole = all(gradient is None for _, gradient in external)
    return Spread(sum(squares) if is_whole else math.nan, len(squares), terms, plan.rows)


def _gradients_of(parts: Sequence[ReplicaSet], replica: int) -> list[Tensor]:
    """What one replica added up; once for a tensor that model and criterion share."""
    found: dict[int, Tensor] = {}
    for part in parts:
        for i in part.trained_indices:
            gradient = part.replicas[replica].tensors[i].grad
            if gradient is not None:
                shared = found.get(id(part.tensors[i]))
                found[id(part.tensors[i])] = gradient if shared is None else shared + gradient
    return list(found.values())


def _estimate(spread: Spread, gradients: Sequence[Tensor], factor: float) -> GradientNoise:
    """The signal and the noise of one step's gradient; NaN where there is nothing to compare.

    ``gradients`` are the whole batch's: the mean of the terms' ones, times ``factor``.
    """
    if spread.replicas < 2 or not spread.terms:
        return GradientNoise(math.nan, math.nan)
    square = _squared_norm(gradients) / factor**2
    if not math.isfinite(spread.squares) or not math.isfinite(square):
        return GradientNoise(math.nan, math.nan)
    variance = (spread.squares - spread.terms * square) / (spread.replicas - 1)
    signal, noise = square - variance / spread.terms, variance * spread.rows / spread.terms
    return GradientNoise(signal, noise)


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements, with one look at the device."""
    values = [_reals(tensor.detach()) for tensor in tensors]
    exact = [value for value in values if value.dtype == torch.float64]
    others = [value for value in values if value.dtype != torch.float64]
    norms: list[float] = []
    for group, dtype in ((exact, torch.float64), (others, torch.float32)):
        if group:
            norms += torch.stack(torch._foreach_norm(group, 2, dtype)).tolist()
    return sum(norm**2 for norm in norms)


def _reals(tensor: Tensor) -> Tensor:
    """All elements; of complex ones, the real and the imaginary parts."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
