"""The loss of some rows with its gradients: what runs of a look are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from scatterpar.numerics.comparison import (
    SMALLEST_SCALE,
    magnitudes,
    relative_difference,
)


@dataclass(frozen=True)
class Result:
    """The loss of some rows and its gradients.

    Attributes:
        loss: the loss, perhaps times a weight.
        gradients: those of the same tensors in every result that is compared.
    """

    loss: float
    gradients: Sequence[Tensor]

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        return all(map(math.isfinite, [self.loss, *magnitudes(self.gradients)]))

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient is not zero."""
        return any(magnitudes(self.gradients))

    def difference_from(self, expected: Result) -> float:
        """The relative difference of gradients, or of losses if that is larger.

        It is infinite if a number of either is NaN or infinite.
        """
        if not (math.isfinite(self.loss) and math.isfinite(expected.loss)):
            return math.inf
        # A loss near zero is a difference of larger terms, whose rounding it has.
        scale = max(abs(self.loss), abs(expected.loss), SMALLEST_SCALE)
        of_losses = abs(self.loss - expected.loss) / scale
        of_gradients = relative_difference(self.gradients, expected.gradients)
        return max(of_losses, of_gradients)

    def plus(self, other: Result) -> Result:
        """The sum of two results. The first summand of all may be ``NOTHING``."""
        gradients = self.gradients or other.gradients
        # A later one has none if its backward pass refuses ``autograd.grad``.
        if self.gradients and other.gradients:
            # Not in place: the first one may be expanded, or the caller's.
            pairs = zip(self.gradients, other.gradients, strict=True)
            gradients = [sum_so_far + gradient for sum_so_far, gradient in pairs]
        return Result(self.loss + other.loss, gradients)


NOTHING = Result(0.0, ())


def weighted_sum(results: Sequence[Result], weights: Sequence[float] = ()) -> Result:
    """The sum of the results times their weights; all 1 by default.

    A result whose weight is zero adds nothing, even if it has NaN.
    """
    total = NOTHING
    for result, weight in zip(results, weights or [1.0] * len(results), strict=True):
        if weight:
            gradients = [weight * gradient for gradient in result.gradients]
            total = total.plus(Result(weight * result.loss, gradients))
    return total
