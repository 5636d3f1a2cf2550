"""Vectors beside each other: factors, and weights with which parts add up to a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The condition number above which several weights explain a vector equally well.
_WORST_CONDITION = 1e9


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether no entry is further off than ``tolerance`` times the largest.

    Nothing is close to NaN or infinity, nor are vectors without an entry.
    """
    if not actual.numel():
        return False
    error = (actual - expected).abs().max()
    bound = tolerance * expected.abs().max()
    return bool(bound.isfinite()) and bool(error <= bound)


def factor_between(actual: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """The number that turns ``expected`` into ``actual``; ``None`` if there is none."""
    # The factor of least squares: with another one the error would be larger.
    square = float(expected @ expected)
    if not square:
        return None
    factor = float(actual @ expected) / square
    return factor if is_close(factor * expected, actual, tolerance) else None


def weights_of_parts(
    parts: Sequence[Tensor], total: Tensor, tolerance: float
) -> Tensor | None:
    """The weights with which vectors of parts add up to ``total``.

    ``None`` if no weights do, or if several do, as in a model with few parameters. None
    do if a number is not finite.
    """
    # A part without labels has no gradient: any weight would do for it.
    used = [number for number, part in enumerate(parts) if part.any()]
    if not used or len(total) < 2 * len(parts):
        return None
    columns = torch.stack([parts[number] for number in used], 1)
    if not (columns.isfinite().all() and total.isfinite().all()):
        return None  # LAPACK refuses these
    # By singular values: the normal equations would square the condition number.
    solved, _, _, sizes = torch.linalg.lstsq(columns, total[:, None], driver="gelsd")
    if sizes[0] > _WORST_CONDITION * sizes[-1]:
        return None
    if not is_close(columns @ solved[:, 0], total, tolerance):
        return None
    weights = torch.zeros(len(parts), dtype=total.dtype)
    weights[used] = solved[:, 0]
    # A weight of zero means "this part is left out", so it must be exact.
    is_rounding = weights.abs() < tolerance**2 * weights.abs().max()
    return weights.masked_fill(is_rounding, 0)
