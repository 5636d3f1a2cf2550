"""The results of the splits of a batch; more splits run when a cause needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import SplitEvidence, Weights
from scatterpar.causes.vectors import is_close, weights_of_parts
from scatterpar.spans import Part
from scatterpar.splitting.gradients import Gradients, joined
from scatterpar.splitting.trial import Comparison, Trial

_FITS = 1e-4  # the largest relative error of an explanation
_LEFT_OVER = 1e-2  # of the difference, by an explanation


@dataclass(frozen=True, eq=False)
class SplitResults(SplitEvidence):
    """The gradients of a trial.

    Attributes:
        trial: the trial, whose ``runs`` run further splits.
        expected: the gradient of the whole batch.
        actual: the gradient of the batch in parts, on rank 0.
        others: the gradients on the other ranks.
        names: all parameters.
        wrong: the parameters whose gradients differ.
        parts: the rows of each part.
        tolerance: the largest relative error of an explanation.
        moves_weights: whether a backward pass is at weights that the step has moved.
        moved: the names of what the step changes in parts, and does not train.
    """

    trial: Trial
    expected: Gradients
    actual: Gradients
    others: Sequence[Gradients]
    names: Sequence[str]
    wrong: Sequence[str]
    parts: Sequence[Part]
    tolerance: float
    moves_weights: bool
    moved: Sequence[str]

    @property
    def counts(self) -> Sequence[Count]:
        """The numbers that the loss may divide by, the most usual first."""
        return self.trial.counts

    @cached_property
    def with_one_part(self) -> Gradients:
        """The gradient that the step itself computes for one part."""
        return self.trial.runs.gradients_of([[self.trial.rows]])

    @cached_property
    def _as_computed(self) -> list[Gradients]:
        """The gradient of each part by itself, which may be 0 / 0 without labels."""
        return [self.trial.runs.gradients_of([[list(part)]]) for part in self.parts]

    @cached_property
    def of_parts(self) -> list[Gradients]:
        """The gradient of each part by itself; zero for a part that has none."""
        gradients = [dict(of_part) for of_part in self._as_computed]
        for of_part in gradients:
            for name, gradient in of_part.items():
                if not _is_finite(gradient):
                    of_part[name] = torch.zeros_like(gradient)
        return gradients

    @cached_property
    def is_undefined(self) -> bool:
        """Whether ``of_parts`` has zeros in the place of what is not finite."""
        everything = chain(*(of_part.values() for of_part in self._as_computed))
        return not all(map(_is_finite, everything))

    def weights(self, names: Sequence[str]) -> Weights | None:
        """The weights of the parts in the loop, and in the whole batch."""
        computed = self.weights_for(self.actual, names)
        if computed is None:  # nothing to compare with
            return None
        right = self.weights_for(self.expected, names)
        if right is None:
            return None
        own = self._own_weights(computed, right)
        return Weights(computed * own, right * own)

    def _own_weights(self, computed: Tensor, right: Tensor) -> Tensor:
        """The weights that a loop gives the loss of each part; else ones.

        ::

            (mean over labels) * rows / 24     a loop that knows the size of the batch
            1, 1, 1, 1                         the parts' weights beside each by itself
            10/24, 7/24, 5/24, 2/24            the weights of their means over labels

        A part by itself gets such a weight, too. It shows if the right weights, times
        the terms of one count, are those of another one.
        """
        ones = torch.ones_like(right)
        is_added = is_close(computed, ones, self.weight_error)
        if not is_added or self.counted_as(right) is not None:
            return ones
        for count in self.counts:
            terms = right.new_tensor(self.terms_of(count))
            total = (right * terms).sum()
            if total and self.counted_as(right * terms) is not None:
                return terms / total
        return ones

    def weights_for(self, total: Gradients, names: Sequence[str]) -> Tensor | None:
        """The weights with which the gradients of the parts add up to ``total``."""
        parts = [joined(gradients, names) for gradients in self.of_parts]
        return weights_of_parts(parts, joined(total, names), self.tolerance)

    def gets_whole_loss(self, factor: float) -> bool:
        """Whether a factor is that of the gradient of the whole loss in each part.

        A temperature gets it if each part computes the loss of all rows, with gradients
        for the outputs of its own.
        """
        num_parts = self.trial.num_parts
        return num_parts > 1 and math.isclose(factor, num_parts, rel_tol=self.tolerance)

    def is_everything(self, names: Sequence[str]) -> bool:
        """Whether these are all parameters that have a gradient."""
        without_gradient = self.trial.invisible(self.expected)
        return set(self.names) <= {*names, *without_gradient}


def split_results(trial: Trial, comparison: Comparison) -> SplitResults:
    """The evidence of a comparison, for the questions of causes."""
    expected = comparison.reference.gradients
    # Rank 0 stands for all: ranks that differ are a cause before all weights.
    actual, *others = [result.gradients for result in comparison.results]
    names = list(expected)
    wrong = trial.differing(actual, expected)
    # An explanation explains nearly all of the difference.
    tolerance = max(min(_FITS, _LEFT_OVER * comparison.worst), trial.limit)
    return SplitResults(
        trial,
        expected=expected,
        actual=actual,
        others=others,
        names=names,
        wrong=wrong,
        parts=list(chain(*trial.split())),
        tolerance=tolerance,
        moves_weights=comparison.reference.moves_weights,
        moved=comparison.results[0].moved,
    )


def _is_finite(gradient: Tensor) -> bool:
    return bool(gradient.isfinite().all())
