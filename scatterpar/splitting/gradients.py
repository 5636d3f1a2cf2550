"""Compare gradients by name: relative errors, factors, and weights of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scatterpar.verify.comparison import SMALLEST_SCALE

Gradients = dict[str, Tensor]  # in float64 on the host, zeros where there is none

# The condition number above which several weights explain a gradient equally well.
_WORST_CONDITION = 1e9


def relative_errors(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """For each parameter the largest difference over the largest entry.

    A gradient that is zero is computed as rounding. So no scale is below a hundredth of
    the largest of all parameters. Not a number counts as infinite.
    """
    sizes = {name: _largest(gradient) for name, gradient in expected.items()}
    floor = max(SMALLEST_SCALE * max(sizes.values()), math.ulp(0.0))
    errors = {}
    for name, gradient in expected.items():
        difference = _largest(actual[name] - gradient)
        error = difference / max(sizes[name], floor)
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def largest_error(actual: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest relative error, and the name of the parameter."""
    errors = relative_errors(actual, expected)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def differing(actual: Gradients, expected: Gradients, limit: float) -> list[str]:
    """The names of the parameters whose gradients differ by more than ``limit``."""
    errors = relative_errors(actual, expected)
    return [name for name, error in errors.items() if error > limit]


def is_zero(gradients: Gradients) -> bool:
    """Whether no parameter has a gradient."""
    return not any(bool(gradient.any()) for gradient in gradients.values())


def is_usable(gradients: Gradients) -> bool:
    """Whether any parameter has a gradient, and all are finite."""
    for gradient in gradients.values():
        if not gradient.isfinite().all():
            return False
    return not is_zero(gradients)


def joined(gradients: Gradients, names: Sequence[str] | None = None) -> Tensor:
    """The gradients of the named parameters, or of all, as one vector."""
    selected = gradients if names is None else names
    return torch.cat([gradients[name].flatten() for name in selected])


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether no entry is further off than ``tolerance`` times the largest."""
    error = (actual - expected).abs().max()
    return bool(error <= tolerance * expected.abs().max())


def factor_between(actual: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """The number that turns ``expected`` into ``actual``; ``None`` if there is none."""
    square = float(expected @ expected)
    if not square:
        return None
    factor = float(actual @ expected) / square
    return factor if is_close(factor * expected, actual, tolerance) else None


def weights_of_parts(
    parts: Sequence[Tensor], total: Tensor, tolerance: float
) -> Tensor | None:
    """The weights with which gradients of parts add up to ``total``.

    ``None`` if no weights do, or if several do, as in a model with few parameters.
    """
    used = [number for number, part in enumerate(parts) if part.any()]
    if not used or len(total) < 2 * len(parts):
        return None
    columns = torch.stack([parts[number] for number in used], 1)
    q, r = torch.linalg.qr(columns)
    sizes = torch.linalg.svdvals(r)
    if sizes[0] > _WORST_CONDITION * sizes[-1]:
        return None
    solved = torch.linalg.solve_triangular(r, (q.T @ total)[:, None], upper=True)
    if not is_close(columns @ solved[:, 0], total, tolerance):
        return None
    weights = torch.zeros(len(parts), dtype=total.dtype)
    weights[used] = solved[:, 0]
    is_rounding = weights.abs() < tolerance**2 * weights.abs().max()
    return weights.masked_fill(is_rounding, 0)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
