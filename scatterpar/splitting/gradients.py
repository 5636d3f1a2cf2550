"""Compare gradients by name: relative errors, factors, and weights of parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from scatterpar.numerics.comparison import SMALLEST_SCALE, relative_differences

Gradients = dict[str, Tensor]  # in float64 on the host, zeros where there is none

EXACT = 1e-6  # the largest relative difference that rounding of float64 explains
_LISTED = 3  # the most names in a text
# Of the largest gradient. Rounding is 1e-16 of it, or more after a cancellation.
_SMALLEST_IN_DOUBLE = 1e-4


def relative_errors(
    actual: Gradients, expected: Gradients, limit: float
) -> dict[str, float]:
    """For each parameter the largest difference over the largest entry.

    A gradient that is zero is computed as rounding. So no scale is below a part of the
    largest of all parameters, which is smaller if all is computed in float64: then
    ``limit`` is. Not a number counts as infinite.
    """
    part = SMALLEST_SCALE if limit > EXACT else _SMALLEST_IN_DOUBLE
    compared = [actual[name] for name in expected]
    errors = relative_differences(compared, list(expected.values()), part)
    return dict(zip(expected, errors, strict=True))


def zeros_of_all(results: Sequence[Gradients]) -> Gradients:
    """Zeros for each gradient that any result has.

    A gradient whose shape depends on the split, as a shard, is left out.
    """
    zeros: Gradients = {}
    for name in union(results):
        shapes = {result[name].shape for result in results if name in result}
        if len(shapes) == 1:
            zeros[name] = torch.zeros(*shapes, dtype=torch.float64)
    return zeros


def largest_error(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest of relative errors, and the name of the parameter.

    Of several that differ by rounding, as if one factor explains all, the first is
    named: so a report is the same in each run.
    """
    largest = max(errors.values())
    least = largest * (1 - EXACT)
    name = next(name for name, error in errors.items() if error >= least)
    return largest, name


def is_zero(gradients: Gradients) -> bool:
    """Whether no parameter has a gradient."""
    return not any(bool(gradient.any()) for gradient in gradients.values())


def joined(gradients: Gradients, names: Sequence[str] | None = None) -> Tensor:
    """The gradients of the named parameters, or of all, as one vector."""
    selected = gradients if names is None else names
    return torch.cat([gradients[name].flatten() for name in selected])


def first_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:_LISTED])
    if len(names) > _LISTED:
        text += f" and {len(names) - _LISTED} more"
    return text


def union(lists: Iterable[Iterable[str]]) -> list[str]:
    """The names in all lists, each once, in order."""
    return list(dict.fromkeys(chain.from_iterable(lists)))


def whole(tensor: Tensor) -> Tensor:
    """A dense copy in float64 on the host; of a ``DTensor`` with all its shards."""
    tensor = tensor.detach()
    # By its method, because importing DTensor takes seconds.
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    dense = as_double(tensor.to_dense().cpu()).clone()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def as_double(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; others stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
