"""The results of a step, before the user's module is written, and the gradient's noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.devices.runtime import physical
from scatterpar.devices.transfers import to_numbers
from scatterpar.replicas.buffers import BatchNormUpdate, BufferValue
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.report import GradientNoise, StepReport, warn
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import LossWeights, has_known_term_count
from scatterpar.step.request import Request

Gradient = tuple[Tensor, "Tensor | None"]  # a leaf of the user's, and its new gradient


class Computed(NamedTuple):
    """The results of all replicas, without the gradients that are in the replicas."""

    loss: float  # of the whole batch
    dtype: torch.dtype  # of the losses
    outputs: tuple[Any, ...]  # to be returned, if the user asked for outputs
    external_gradients: list[Gradient]  # of the user's own leaves, which no replica has copied
    written_buffers: set[int]  # ids of the user's buffers that the criterion has written


@dataclass(frozen=True)
class Spread:
    """How much the replicas' gradients differ."""

    # The sum over replicas: number of terms x squared norm of their mean gradient; NaN: unknown.
    squares: float = 0.0
    replicas: float = 0  # the number of replicas that had terms
    terms: float = 0  # the number of all terms; of rows, if the loss is a sum
    rows: float = 0  # the number of rows in the batch


@dataclass
class Outcome:
    """The results of a step: everything that the commit writes, and the report."""

    attempt: Attempt  # the one that succeeded
    loss: float  # of the whole batch
    dtype: torch.dtype  # of the losses
    terms: float  # the number of terms that a mean loss averages over; 1 for a sum
    spread: Spread  # of the replicas' gradients, if it was measured
    outputs: tuple[Any, ...]  # to be returned, if the user asked for outputs
    gradients: list[Gradient]  # of every trained tensor of the user's
    buffers: list[BufferValue]
    layers: list[BatchNormUpdate]  # batch normalisations that are updated once per step
    retries: int = 0  # earlier tries that ran out of memory

    @property
    def request(self) -> Request:
        """The request of ``attempt``."""
        return self.attempt.request

    def noise(self) -> GradientNoise:
        """The gradient's noise; NaN if there is nothing to compare. Call it before the commit."""
        spread, is_mean = self.spread, self.request.is_mean
        square = math.nan
        is_known = self.request.backward and math.isfinite(spread.squares)
        if spread.replicas > 1 and spread.terms and is_known:
            gradients = [gradient for _, gradient in self.gradients if gradient is not None]
            factor = self.request.scale * (1.0 if is_mean else spread.terms)
            square = _squared_norm(gradients) / factor**2
        if not math.isfinite(square):
            return GradientNoise(math.nan, math.nan)
        variance = (spread.squares - spread.terms * square) / (spread.replicas - 1)
        noise = variance * spread.rows / spread.terms
        return GradientNoise(square - variance / spread.terms, noise)

    def loss_tensor(self) -> Tensor:
        """The loss, on the master. Warns, or with ``check_finite`` raises, if no label counts."""
        if not self.terms and has_known_term_count(self.request):
            text = "no label of this batch counts: all are ignored, and torch's mean of none is NaN"
            if self.request.check_finite:
                raise FloatingPointError(f"{text}; nothing was changed")
            warn(f"{text}; here the loss is 0, and nothing is added to gradients")
        device = physical(self.attempt.plan.shares[0].device)
        # Not copied from the host, which would wait.
        return torch.full((), self.loss, dtype=self.dtype, device=device)

    def report(self, noise: GradientNoise | None, waited: float) -> StepReport:
        """The report of the step, which began ``waited`` seconds after the previous one."""
        plan, clock, transfers = self.attempt.plan, self.attempt.clock, self.attempt.transfers
        replica_seconds = [0.0] * len(plan.shares)
        for spans in clock.replica_spans:
            for replica, (start, end) in spans.items():
                replica_seconds[replica] += end - start
        counted = clock.seconds, transfers.bytes, transfers.messages, self.retries
        return StepReport(plan, self.loss, *counted, noise, waited, tuple(replica_seconds))


def measure(
    attempt: Attempt,
    replica_sets: Sequence[ReplicaSet],
    weights: LossWeights,
    external: Sequence[Gradient],
) -> Spread:
    """The spread of the replicas' gradients; call it before they are added."""
    request, plan = attempt.request, attempt.plan
    counts = [float(share.rows) for share in plan.shares]
    if request.is_mean:
        counts = [sum(factors) * weights.terms for factors in weights.by_share]
    # Gradients of a mean were divided by the number of all terms, those of a sum by nothing.
    scale = request.scale / weights.terms if request.is_mean and weights.terms else request.scale
    squares = [
        count * _squared_norm(_gradients_of(replica_sets, replica)) / (scale * count) ** 2
        for replica, count in enumerate(counts)
        if count
    ]
    # A criterion that closes over parameters writes their gradients directly, not on replicas.
    is_whole = all(gradient is None for _, gradient in external)
    return Spread(sum(squares) if is_whole else math.nan, len(squares), sum(counts), plan.rows)


def _gradients_of(replica_sets: Sequence[ReplicaSet], replica: int) -> list[Tensor]:
    """The gradients of one replica; a tensor that model and criterion share counts once."""
    gradients: dict[int, Tensor] = {}
    for each in replica_sets:
        for i in each.trained_indices:
            gradient = each.replicas[replica].tensors[i].grad
            if gradient is not None:
                shared = gradients.get(id(each.tensors[i]))
                gradients[id(each.tensors[i])] = gradient if shared is None else shared + gradient
    return list(gradients.values())


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements; the host reads the device once."""
    values = [_reals(tensor.detach()) for tensor in tensors]
    exact = [value for value in values if value.dtype == torch.float64]
    others = [value for value in values if value.dtype != torch.float64]
    norms: list[float] = []
    for group, dtype in ((exact, torch.float64), (others, torch.float32)):
        if group:
            norms += to_numbers(torch.stack(torch._foreach_norm(group, 2, dtype)))
    return sum(norm**2 for norm in norms)


def _reals(tensor: Tensor) -> Tensor:
    """All elements as real numbers; of complex ones, the real and the imaginary parts."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
