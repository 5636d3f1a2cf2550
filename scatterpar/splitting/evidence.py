"""Numbers on which a hypothesis about a wrong gradient is tested."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from scatterpar.splitting import parts as row_parts
from scatterpar.splitting.gradients import (
    Gradients,
    differing,
    factor_between,
    is_close,
    joined,
    largest_error,
    weights_of_parts,
)
from scatterpar.splitting.step_run import StepResult
from scatterpar.splitting.trial import Trial

_FITS = 1e-4  # the largest relative error of an explanation
_PER_PART = (2, 3)  # numbers of parts, to see how a difference grows
_ROUNDING = 1e-9  # of the largest entry
_LEAST_NUMBERS = 3  # of a gradient that is a multiple of another one


class GradientEvidence:
    """The gradients of a trial, compared in several ways.

    Attributes:
        expected: the gradient of the whole batch.
        actual: the gradient of the batch in parts, on rank 0.
        others: the gradients on the other ranks.
        names: all parameters.
        wrong: the parameters whose gradients differ.
        parts: the rows of all parts, rank by rank.
        unit: what the batch is cut into: parts, or ranks.
        is_undefined: whether ``of_parts`` replaced one that is not finite.
    """

    def __init__(
        self, trial: Trial, expected: Gradients, results: list[StepResult]
    ) -> None:
        self.trial = trial
        self.expected = expected
        self.actual = results[0].gradients
        self.others = [result.gradients for result in results[1:]]
        self.names = list(expected)
        self.wrong = differing(self.actual, expected, trial.limit)
        self.parts = [part for share in trial.split() for part in share]
        self.unit = "part" if trial.ranks == 1 else "rank"
        self.is_undefined = False
        self.tolerance = max(_FITS, trial.limit)

    def error_with_one_part(self) -> float:
        """The largest error of the step with the whole batch as one part."""
        return largest_error(self.with_one_part, self.expected)[0]

    @cached_property
    def with_one_part(self) -> Gradients:
        """The gradient that the step itself computes for one part."""
        return self.trial.results([[self.trial.rows]])[0].gradients

    @cached_property
    def of_parts(self) -> list[Gradients]:
        """The gradient of each part by itself; zero for a part that has none."""
        gradients = []
        for part in self.parts:
            result = self.trial.results([[part]])[0]
            for name, gradient in result.gradients.items():
                if not gradient.isfinite().all():  # 0 / 0 of a part without labels
                    result.gradients[name] = torch.zeros_like(gradient)
                    self.is_undefined = True
            gradients.append(result.gradients)
        return gradients

    def factor(self, names: Sequence[str]) -> float | None:
        """The one number that the right gradient is multiplied by, if there is one."""
        actual = joined(self.actual, names)
        if len(actual) < _LEAST_NUMBERS:
            return None
        return factor_between(actual, joined(self.expected, names), self.tolerance)

    def weights_of_loop(self, names: Sequence[str]) -> Tensor | None:
        """The weights of the parts, if the loop adds up their gradients."""
        return self._weights(self.actual, names)

    def weights_of_batch(self, names: Sequence[str]) -> Tensor | None:
        """The weights with which the parts add up to the whole batch."""
        return self._weights(self.expected, names)

    def _weights(self, total: Gradients, names: Sequence[str]) -> Tensor | None:
        parts = [joined(gradients, names) for gradients in self.of_parts]
        return weights_of_parts(parts, joined(total, names), self.tolerance)

    def counted_as(self, weights: Tensor) -> str:
        """What weights are proportional to: rows, labels, or nothing known."""
        trial = self.trial
        for name, counts in row_parts.counts_of_rows(trial.tensors, len(trial.rows)):
            terms = [sum(counts[row] for row in part) for part in self.parts]
            shares = torch.tensor(terms, dtype=weights.dtype)
            if not shares.sum() or not weights.sum():
                continue
            if is_close(weights / weights.sum(), shares / shares.sum(), 1e-3):
                return name
        return ""

    def order_matters(self) -> bool:
        """Whether the parts of each rank in reverse order give another gradient."""
        backwards = [share[::-1] for share in self.trial.split()]
        actual = self.trial.results(backwards)[0].gradients
        return largest_error(actual, self.actual)[0] > self.trial.limit

    def growth_per_part(self) -> tuple[float, float] | None:
        """How the difference grows from two parts to three, and the cosine of both.

        A term that counts in each part grows two-fold: once too often, then twice. The
        parts are alike, so that the term is. ``None`` for too few rows, or no
        difference.
        """
        trial = self.trial
        per_unit = 1 if trial.ranks == 1 else trial.parts
        multiple = _PER_PART[0] * _PER_PART[1] * per_unit
        rows = trial.rows[: len(trial.rows) // multiple * multiple]
        if not rows:
            return None
        expected = joined(trial.reference(rows).gradients)
        differences = []
        for number in _PER_PART:
            dealt = [row for start in range(number) for row in rows[start::number]]
            ranks, parts = (1, number) if trial.ranks == 1 else (number, trial.parts)
            results = trial.results(trial.cut(dealt, ranks, parts, equal=True))
            differences.append(joined(results[0].gradients) - expected)
        two, three = differences
        if not two.any() or not three.any():
            return None
        growth = float(three.norm() / two.norm())
        return growth, float(torch.cosine_similarity(two, three, dim=0))

    def shows_in(self) -> list[str]:
        """The wrong parameters, if others that have a gradient are right."""
        return [] if self.is_everything(self.wrong) else self.wrong

    def is_everything(self, names: Sequence[str]) -> bool:
        """Whether these are all parameters that have a gradient."""
        scale = joined(self.expected).abs().max()
        for name in self.names:
            gradient = self.expected[name]
            if name not in names and gradient.abs().max() > _ROUNDING * scale:
                return False
        return True
