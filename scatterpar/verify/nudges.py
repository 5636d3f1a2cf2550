"""Nudges: changes of parameters by rounding, which show how far rounding may reach.

::

    nudge    size           explains a difference of up to
    0        eps / 2        4 times what it changes
    …        larger
    15       16 eps         2 times what it changes, of differences below 20 %

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_NUDGES = 16
# The last nudge is so many times the first: kernels for few rows round by several
# units. In half precision so large a nudge would hide an error.
_GROWTH = 32
_GROWTH_IN_HALF_PRECISION = 4
_HALF_PRECISION = 1e-5  # formats with a larger eps


@dataclass(frozen=True)
class Factor:
    """How much more than the effect of a nudge rounding may explain.

    Attributes:
        nudges: the numbers of the nudges.
        factor: the factor of their effects.
        most: differences above this are not explained.
        reason: why the factor holds.
    """

    nudges: range
    factor: float
    most: float
    reason: str


FACTORS = (
    Factor(range(1), 4.0, math.inf, "the smallest nudge has the surest effect"),
    Factor(
        range(1, NUM_NUDGES),
        2.0,
        0.2,
        "rounding at a ReLU shows in every third nudge, and seldom changes more",
    ),
)


@dataclass(frozen=True)
class Nudge:
    """A change of each number by rounding, in another way per ``number``.

    Attributes:
        number: later nudges are larger.
        eps: the rounding of the coarsest format.
    """

    number: int
    eps: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """A nudged copy of a tensor."""
        is_half = self.eps >= _HALF_PRECISION
        growth = _GROWTH_IN_HALF_PRECISION if is_half else _GROWTH
        size = self.eps / 2 * growth ** (self.number / (NUM_NUDGES - 1))
        # Cosines of far angles: as good as random, and the same in every look.
        positions = torch.arange(tensor.numel(), device=tensor.device)
        angles = positions * (1 + self.number) + self.number
        changes = angles.cos().view(tensor.shape) * size
        nudged: Tensor = tensor * (1 + changes.to(tensor.dtype))
        return nudged


def rounding_limit(effects: Sequence[float], difference: float) -> float:
    """The largest difference that rounding explains; ``effects`` are of nudges 0, 1, …

    ``difference`` is the one to be explained.
    """
    limit = 0.0
    for row in FACTORS:
        if difference > row.most:
            continue
        for effect in effects[row.nudges.start : row.nudges.stop]:
            if math.isfinite(effect):  # else it overflowed, which is no rounding
                limit = max(limit, row.factor * effect)
    return limit
