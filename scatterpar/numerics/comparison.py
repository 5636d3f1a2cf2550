"""Compare gradients and outputs that were computed in different ways.

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.copies import to_numbers

# A gradient below this part of the largest one may be rounding alone.
SMALLEST_SCALE = 1e-2

_SHOWN_LENGTH = 120  # of a reason, which may be an error of user code

LeafGradients = Sequence[Tensor | None]


class Inconclusive(Exception):
    """The look is inconclusive.

    Attributes:
        patience: after so many such looks in a row, a warning says so.
        is_final: whether this kind of step is not looked at again.
        remedy: a sentence with what to do, if no argument of the call helps.
    """

    def __init__(
        self, why: str, patience: int = 4, is_final: bool = False, remedy: str = ""
    ) -> None:
        super().__init__(why)
        self.patience = patience
        self.is_final = is_final
        self.remedy = remedy

    @property
    def shown(self) -> str:
        """The first line, shortened."""
        return str(self).strip().partition("\n")[0][:_SHOWN_LENGTH].rstrip(".")


class SaysNothing(Inconclusive):
    """These rows say nothing of how losses combine. Others may."""


class NoTerms(SaysNothing):
    """A mean over terms that these rows do not have."""


class OnlyRounding(Inconclusive):
    """Rounding changes the gradient so much that it is nothing else.

    The losses are equal, up to rounding.
    """


def relative_difference(actual: LeafGradients, expected: LeafGradients) -> float:
    """The largest of ``relative_differences``."""
    return max(relative_differences(actual, expected), default=0.0)


def relative_differences(
    actual: LeafGradients,
    expected: LeafGradients,
    smallest_scale: float = SMALLEST_SCALE,
) -> list[float]:
    """The relative differences between gradients of the same tensors.

    For each tensor it is the largest difference of an entry over the largest entry, or
    over a part of the largest entry of all tensors, ``smallest_scale``, if that is
    more. It is infinite for NaN and infinity, or if only one of the two has a gradient
    and it is not zero.
    """
    pairs = list(zip(actual, expected, strict=True))
    differences = magnitudes([_gradient_difference(*pair) for pair in pairs])
    scales = magnitudes(expected)
    # Beside an infinite scale every difference would be zero.
    largest = max(filter(math.isfinite, scales), default=0.0)
    floor = max(smallest_scale * largest, math.ulp(0.0))
    quotients: list[float] = []
    for pair, difference, scale in zip(pairs, differences, scales, strict=True):
        is_comparable = math.isfinite(difference) and math.isfinite(scale)
        if difference == 0:
            quotients.append(0.0)
        elif is_comparable and all(gradient is not None for gradient in pair):
            quotients.append(difference / max(scale, floor))
        else:
            quotients.append(math.inf)
    return quotients


def _gradient_difference(
    actual: Tensor | None, expected: Tensor | None
) -> Tensor | None:
    """The difference of two gradients, of which one may be ``None``."""
    if actual is None:
        return expected
    if expected is None:
        return actual
    return actual.to_dense() - expected.to_dense()


def magnitudes(tensors: LeafGradients) -> list[float]:
    """The largest absolute entry of each tensor; zero if it has none."""
    sizes = [0.0] * len(tensors)
    norms_by_kind: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for number, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            norm = torch.linalg.vector_norm(tensor.detach().to_dense(), math.inf)
            norms_by_kind[norm.device, norm.dtype][number] = norm
    # One copy to the host for all of a kind: each by itself would wait for its device.
    for norms in norms_by_kind.values():
        numbers = to_numbers(torch.stack([*norms.values()]))
        for number, size in zip(norms, numbers, strict=True):
            sizes[number] = size
    return sizes
