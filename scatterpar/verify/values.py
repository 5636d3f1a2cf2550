"""What a criterion does with two micro-batches joined, beside each: told by losses alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scatterpar.step.slices import together
from scatterpar.verify.evidence import Finding, Pieces, Unsure, tolerance_of

__all__ = ["by_values"]

# Values come from another forward pass, with rounding of its own, and differ less than gradients.
_TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
_COARSE = 1e-5  # with a larger tolerance hardly any wrong weight shows in values
_ROUNDINGS = 8  # a value is off where it differs by so many times the rounding that was measured
_VISIBLE = 100  # and tells something where the two losses differ by so many tolerances


def by_values(
    loss_of: Callable[[Any, Any], Tensor],
    pieces: Pieces,
    losses: tuple[float, float],
    dtypes: set[torch.dtype],
) -> Finding:
    """Compare losses, where they are all there is.

    Args:
        loss_of: the loss of some inputs and targets, without a graph.
        pieces: with the inputs as what is given.
        losses: those of the pieces, as the step computed them.
        dtypes: what was computed in.

    Raises:
        Unsure: losses that are not finite, or so much alike that any weights are right.
        Exception: what the module raises.
    """

    def joint(*positions: int) -> float:
        some = pieces.only(*positions)
        loss = loss_of(together(some.given, some.dim), together(some.targets, some.dim))
        dtypes.add(loss.dtype)
        return float(loss)

    used = [k for k, factor in enumerate(pieces.factors) if factor]
    both = joint(0, 1)
    expected = sum(losses[k] * pieces.factors[k] for k in used)
    if not math.isfinite(both) or not all(math.isfinite(losses[k]) for k in used):
        raise Unsure("a loss is NaN or infinite", lasting=False)
    size = max(abs(both), *(abs(losses[k]) for k in used))
    tolerance = size * tolerance_of(dtypes, _TOLERANCES)
    off = abs(both - expected)
    if off <= tolerance:
        is_sum = pieces.factors == (1.0, 1.0)
        alike = len(used) < 2 or abs(losses[0] - losses[1]) <= _VISIBLE * tolerance
        if not size or (alike and not is_sum):
            raise Unsure("both losses are the same", lasting=tolerance > size * _COARSE)
        if is_sum and not all(losses):
            raise Unsure("a mean of one thing alone is its sum", lasting=False)
        return Finding()
    # A mean of the same rows twice is what it is of them once: what differs is rounding.
    rounding = max(_rounding(joint(k, k), losses[k]) for k in used)
    if off <= tolerance + _ROUNDINGS * rounding:
        raise Unsure("rounding is as large as what is to be told")
    tolerance += _ROUNDINGS * rounding
    return _explained_by_values(off / size, tolerance, both, losses, pieces)


def _rounding(twice: float, once: float) -> float:
    """How far the loss of some rows twice is from a mean's or from a sum's, the nearer of them."""
    return min(abs(twice - once), abs(twice - 2 * once))


def _explained_by_values(
    off: float, tolerance: float, joint: float, losses: tuple[float, float], pieces: Pieces
) -> Finding:
    one, other = losses
    if one and other and abs(joint - (one + other)) <= tolerance:
        return Finding(off, "sum", (1.0, 1.0))
    by_rows = pieces.by_rows
    if abs(joint - (one * by_rows[0] + other * by_rows[1])) <= tolerance:
        return Finding(off, "mean", by_rows)
    if one != other and 0 <= (weight := (joint - other) / (one - other)) <= 1:
        return Finding(off, "weighted", (weight, 1 - weight))
    return Finding(off, "coupled")
