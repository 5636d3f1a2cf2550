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

import torch
from torch import Tensor

NUM_NUDGES = 16
# The last nudge is so many times the first: kernels for few rows round by several
# units. In half precision so large a nudge would hide an error.
_GROWTH = 32
_GROWTH_IN_HALF_PRECISION = 4
_EPS_OF_HALF_PRECISION = 1e-5  # formats with a larger eps


# More than the effect of a nudge rounding may explain. The smallest nudge has the
# surest effect.
_FACTOR_OF_FIRST = 4.0
# Rounding at a ReLU shows in every third nudge, and seldom changes more.
_FACTOR_OF_LATER = 2.0
_MOST_BY_LATER = 0.2  # larger differences are not explained


def nudged(tensor: Tensor, number: int, eps: float) -> Tensor:
    """A copy whose numbers are changed by rounding, in another way per ``number``.

    ``eps`` is the rounding of the coarsest format.
    """
    growth = _GROWTH_IN_HALF_PRECISION if eps >= _EPS_OF_HALF_PRECISION else _GROWTH
    size = eps / 2 * growth ** (number / (NUM_NUDGES - 1))
    # Cosines of far angles: as good as random, and the same in every look.
    positions = torch.arange(tensor.numel(), device=tensor.device)
    angles = positions * (1 + number) + number
    changes = angles.cos().view(tensor.shape) * size
    copy: Tensor = tensor * (1 + changes.to(tensor.dtype))
    return copy


def rounding_limit(effects: Sequence[float], difference: float) -> float:
    """The largest difference that rounding explains; ``effects`` are of nudges 0, 1, …

    ``difference`` is the one to be explained.
    """
    limits = [_FACTOR_OF_FIRST * effect for effect in effects[:1]]
    if difference <= _MOST_BY_LATER:
        limits += [_FACTOR_OF_LATER * effect for effect in effects[1:]]
    # Else it overflowed, which is no rounding.
    return max(filter(math.isfinite, limits), default=0.0)
