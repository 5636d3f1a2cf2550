"""The gradient's noise, from how much the replicas' gradients differ: nearly for free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scatterpar.plan import Plan
from scatterpar.replicas.replicas import Replicas
from scatterpar.report import GradientNoise
from scatterpar.step.request import Request
from scatterpar.step.weights import Weights


@dataclass(frozen=True)
class Spread:
    """How far the replicas' gradients lie apart.

    Attributes:
        squares: the sum over the replicas of their terms times the squared norm of their mean
            gradient; NaN where it cannot be told.
        replicas: how many of them had terms.
        terms: how many terms all of them had; rows, where the loss is a sum.
        rows: the rows of the batch.
    """

    squares: float = 0.0
    replicas: float = 0
    terms: float = 0
    rows: float = 0


def measure(
    request: Request,
    parts: Sequence[Replicas],
    plan: Plan,
    weights: Weights,
    past: Sequence[tuple[Tensor, Tensor | None]],
) -> Spread:
    """The spread of the replicas' gradients, before they are added up.

    Args:
        request: says how the losses combined.
        parts: the replicas of the model, and those of the criterion.
        plan: the shares.
        weights: of the micro-batches' losses. Where the loss is a sum, its rows are its terms.
        past: what came to the user's leaves past the replicas.
    """
    terms = weights.terms
    if request.is_mean:
        counts = [sum(own) * terms for own in weights.of_shares]
        added = [request.scale * sum(own) for own in weights.of_shares]
    else:
        counts = [float(share.rows) for share in plan.shares]
        added = [request.scale * count for count in counts]
        terms = sum(counts)
    squares = [
        count * _squared_norm(_gradients_of(parts, replica)) / factor**2
        for replica, (count, factor) in enumerate(zip(counts, added, strict=True))
        if count
    ]
    # A criterion that closes over parameters writes past the replicas, and what the module keeps
    # that was made of them passes its gradient on later.
    is_whole = all(gradient is None for _, gradient in past)
    is_whole = is_whole and not any(_uses_kept(part) for part in parts)
    return Spread(sum(squares) if is_whole else math.nan, len(squares), terms, plan.rows)


def estimate(spread: Spread, gradients: Sequence[Tensor], factor: float) -> GradientNoise:
    """The signal and the noise of one step's gradient; NaN where there is nothing to compare.

    Args:
        spread: of all ranks together.
        gradients: the whole batch's, as they will be committed.
        factor: what the mean gradient of the terms is multiplied with in them.
    """
    if spread.replicas < 2 or not spread.terms:
        return GradientNoise(math.nan, math.nan)
    square = _squared_norm(gradients) / factor**2
    if not math.isfinite(spread.squares) or not math.isfinite(square):
        return GradientNoise(math.nan, math.nan)
    variance = (spread.squares - spread.terms * square) / (spread.replicas - 1)
    return GradientNoise(
        signal=square - variance / spread.terms,
        noise=variance * spread.rows / spread.terms,
    )


def _uses_kept(part: Replicas) -> bool:
    return any(replica.tensors[i].grad is not None for replica in part.replicas for i in part.kept)


def _gradients_of(parts: Sequence[Replicas], replica: int) -> list[Tensor]:
    """What one replica added up; once for a tensor that model and criterion share."""
    found: dict[int, Tensor] = {}
    for part in parts:
        for i in part.trained:
            gradient = part.replicas[replica].tensors[i].grad
            if gradient is not None:
                shared = found.get(id(part.tensors[i]))
                found[id(part.tensors[i])] = gradient if shared is None else shared + gradient
    return list(found.values())


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
