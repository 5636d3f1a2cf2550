"""The loss of some rows with its gradients: what runs of a look are compared by."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import torch
from torch import Tensor

from scatterpar.numerics.comparison import (
    SMALLEST_SCALE,
    magnitudes,
    relative_difference,
)
from scatterpar.step.attempt import Attempt
from scatterpar.step.task import ReplicaTask


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
        of_losses = self.loss_difference_from(expected)
        if of_losses == math.inf:
            return math.inf
        of_gradients = relative_difference(self.gradients, expected.gradients)
        return max(of_losses, of_gradients)

    def loss_difference_from(self, expected: Result) -> float:
        """The relative difference of losses; infinite if one is NaN or infinite."""
        if not (math.isfinite(self.loss) and math.isfinite(expected.loss)):
            return math.inf
        # A loss near zero is a difference of larger terms, whose rounding it has.
        scale = max(abs(self.loss), abs(expected.loss), SMALLEST_SCALE)
        return abs(self.loss - expected.loss) / scale

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


# Of parameters that are compared: gradients of all might not fit into memory.
MAX_ELEMENTS = 2**20


class ComparedLeaves:
    """The user's smallest leaves, each with its copies in the replica."""

    def __init__(self, attempt: Attempt, task: ReplicaTask) -> None:
        copies: dict[int, list[Tensor]] = {}
        # Model and criterion may share a leaf: each of the two has a copy of it.
        pairs = zip(attempt.replicas.replica_sets, task.replicas, strict=False)
        for replica_set, replica in pairs:
            for slot in replica_set.slots.trained:
                if slot.is_leaf:
                    leaves = copies.setdefault(id(slot.tensor), [slot.tensor])
                    leaves.append(replica.tensors[slot.number])
        # The smallest first, so that most layers have one within the limit.
        by_size = sorted(copies.values(), key=lambda leaves: leaves[0].numel())
        sizes = list(accumulate(leaves[0].numel() for leaves in by_size))
        # One at least, because losses alone hide wrong weights of equal losses.
        self._by_leaf = by_size[: max(1, bisect(sizes, MAX_ELEMENTS))]

    def all(self) -> list[Tensor]:
        """The user's leaves and all copies."""
        return list(chain(*self._by_leaf))

    def copies(self) -> list[Tensor]:
        """The replica's copies, each once."""
        copies = chain(*(leaves[1:] for leaves in self._by_leaf))
        return list({id(copy): copy for copy in copies}.values())

    def sums(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """For each of the user's leaves the sum of its own gradient and its copies'.

        ``gradients`` are those of ``all()``; zeros if there are none.
        """
        sums: list[Tensor] = []
        remaining = iter(gradients or [None] * len(self.all()))
        for leaves in self._by_leaf:
            terms = islice(remaining, len(leaves))
            # Sparse gradients of an embedding are compared as dense ones.
            dense = [term.detach().to_dense() for term in terms if term is not None]
            # Not in place: autograd may give one gradient to several tensors.
            sums.append(sum(dense, torch.zeros_like(leaves[0])))
        return sums
