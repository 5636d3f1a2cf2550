"""The gradients of several splits of a batch, on which causes are tested."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from scatterpar.causes.cause_list import other_weights
from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import (
    CLOSE,
    CauseKind,
    Finding,
    Growth,
    Question,
    SplitEvidence,
    Weights,
)
from scatterpar.causes.vectors import factor_between, is_close, weights_of_parts
from scatterpar.splitting.gradients import (
    Gradients,
    is_zero,
    joined,
    union,
)
from scatterpar.splitting.trial import Comparison, Trial

_FITS = 1e-4  # the largest relative error of an explanation
_LEFT_OVER = 1e-2  # of the difference, by an explanation
_UNITS = (2, 3)  # numbers of parts or ranks, to see how a difference grows
_NUM_GROUPS = 2
_LEAST_NUMBERS = 3  # of a gradient that is a multiple of another one


class GradientEvidence(SplitEvidence):
    """The gradients of a trial, compared in several ways.

    Attributes:
        results, weighing: what is compared and how it is combined, in words.
        expected: the gradient of the whole batch.
        actual: the gradient of the batch in parts, on rank 0.
        others: the gradients on the other ranks.
        names: all parameters.
        wrong: the parameters whose gradients differ.
        moves_weights: whether a backward pass is at weights that the step has moved.
        is_undefined: whether ``of_parts`` replaced one that is not finite.
    """

    results = "gradients"
    weighing = "the loop weighs the parts"

    def __init__(self, trial: Trial, comparison: Comparison) -> None:
        self.trial = trial
        self.expected = comparison.reference.gradients
        self.moves_weights = comparison.reference.moves_weights
        # Rank 0 stands for all: ranks that differ are a cause before all weights.
        self.actual, *self.others = [r.gradients for r in comparison.results]
        self.names = list(self.expected)
        self.wrong = trial.differing(self.actual, self.expected)
        self.parts = list(chain(*trial.split()))
        self.is_undefined = False
        # An explanation explains nearly all of the difference.
        self.tolerance = max(min(_FITS, _LEFT_OVER * comparison.worst), trial.limit)

    @property
    def counts(self) -> Sequence[Count]:
        """What the loss may divide by, the most usual first."""
        return self.trial.counts

    def questions(self) -> Mapping[CauseKind, Question]:
        """The causes that a yes shows, with one or several further runs."""
        questions: dict[CauseKind, Question] = {
            CauseKind.NOT_FINITE: GradientEvidence.is_not_finite,
            CauseKind.WRONG_WITH_ONE_PART: GradientEvidence.is_wrong_with_one_part,
            CauseKind.RANKS_DIFFER: GradientEvidence.differing_ranks,
            CauseKind.CONSTANT_FACTOR: GradientEvidence.factor_or_weights,
            CauseKind.ONCE_PER_PART: GradientEvidence.once_per_part,
            CauseKind.OTHER_WEIGHTS: GradientEvidence.factor_or_weights_of_one,
            CauseKind.MEAN_OF_MEANS: GradientEvidence.mean_of_means_in_a_term,
        }
        # With moved weights, order and rows matter in any loop.
        if not self.moves_weights:
            questions[CauseKind.STATE_BETWEEN_PARTS] = (
                GradientEvidence.depends_on_earlier_parts
            )
            questions[CauseKind.ROWS_ARE_COMPARED] = GradientEvidence.do_rows_meet
        return questions

    def is_not_finite(self) -> bool:
        """Whether the gradient of the whole batch or that in parts has NaN."""
        numbers = torch.cat([joined(self.expected), joined(self.actual)])
        return not bool(numbers.isfinite().all())

    def is_wrong_with_one_part(self) -> bool:
        """With ``loss=``: whether the step is wrong for a single part, too."""
        if not self.trial.arguments.loss:
            return False
        return bool(self.trial.differing(self.with_one_part, self.expected))

    @cached_property
    def with_one_part(self) -> Gradients:
        """The gradient that the step itself computes for one part."""
        return self.trial.gradients_of([[self.trial.rows]])

    def differing_ranks(self) -> Finding | None:
        """The parameters whose gradients differ between ranks."""
        names = union(self.trial.differing(rank, self.actual) for rank in self.others)
        return Finding(CauseKind.RANKS_DIFFER, names) if names else None

    def factor_or_weights(self) -> Finding | None:
        """The one factor, or the weights of the parts, that explain what is wrong."""
        # One of several losses reaches some parameters alone.
        return self._first_in([self.names, self.wrong])

    def factor_or_weights_of_one(self) -> Finding | None:
        """A factor or weights that explain one of the wrong parameters."""
        return self._first_in([[name] for name in self.wrong])

    def _first_in(self, scopes: Sequence[Sequence[str]]) -> Finding | None:
        for names in scopes:
            # One number says more than as many weights as there are parts.
            finding = self.constant_factor(names) or other_weights(self, names)
            if finding is not None:
                return finding
        return None

    @cached_property
    def of_parts(self) -> list[Gradients]:
        """The gradient of each part by itself; zero for a part that has none."""
        gradients = []
        for part in self.parts:
            of_part = self.trial.gradients_of([[list(part)]])
            for name, gradient in of_part.items():
                if not gradient.isfinite().all():  # 0 / 0 of a part without labels
                    of_part[name] = torch.zeros_like(gradient)
                    self.is_undefined = True
            gradients.append(of_part)
        return gradients

    def constant_factor(self, names: Sequence[str]) -> Finding | None:
        """The one number that the right gradient is multiplied by, if there is one."""
        actual = joined(self.actual, names)
        expected = joined(self.expected, names)
        factor = factor_between(actual, expected, self.tolerance)
        if factor is None or math.isclose(factor, 1, rel_tol=self.tolerance):
            return None
        # Any two numbers are multiples of each other, and zero is of all.
        is_any = (actual.abs() + expected.abs()).count_nonzero() < _LEAST_NUMBERS
        if is_any and not self.gets_whole_loss(factor):
            return None
        # A factor of zero has remedies of its own: something is detached.
        kind = CauseKind.CONSTANT_FACTOR if factor else CauseKind.NO_GRADIENT
        return Finding(kind, names, factor=factor)

    def gets_whole_loss(self, factor: float) -> bool:
        """Whether a factor is that of the gradient of the whole loss in each part.

        A temperature gets it if each part computes the loss of all rows, with gradients
        for the outputs of its own.
        """
        parts = self.trial.parts
        return parts > 1 and math.isclose(factor, parts, rel_tol=self.tolerance)

    def weights(self, names: Sequence[str]) -> Weights | None:
        """The weights of the parts in the loop, and in the whole batch."""
        computed = self._weights(self.actual, names)
        if computed is None:  # nothing to compare with
            return None
        right = self._weights(self.expected, names)
        return None if right is None else Weights(computed, right)

    def _weights(self, total: Gradients, names: Sequence[str]) -> Tensor | None:
        parts = [joined(gradients, names) for gradients in self.of_parts]
        return weights_of_parts(parts, joined(total, names), self.tolerance)

    def depends_on_earlier_parts(self) -> bool:
        """Whether the parts of each rank in reverse order give another gradient."""
        # Sums do not depend on the order, what one part leaves for the next does.
        backwards = [share[::-1] for share in self.trial.split()]
        gradients = self.trial.gradients_of(backwards)
        return bool(self.trial.differing(gradients, self.actual))

    def once_per_part(self) -> Finding | None:
        """A term of the loss counts in each part, or on each rank."""
        for growth in self.growths():
            if growth.is_of_a_term:
                return Finding(CauseKind.ONCE_PER_PART, growth=growth)
        return None

    def growths(self) -> list[Growth]:
        """How the difference grows from two parts to three, and from two ranks.

        A term that counts in each part grows two-fold: once too often, then twice. With
        ranks, it may count in each part of all ranks, too: from 2 ranks of 3 parts to 3
        ranks, it grows from 5 times too often to 8 times.
        """
        ranks, parts = self.trial.ranks, self.trial.parts
        growths: list[Growth] = []
        if ranks > 1:
            growths += self._growth("rank", parts)
        if parts > 1:
            growths += self._growth("part", ranks)
        return growths

    def _growth(self, unit: str, others: int) -> list[Growth]:
        """The growth from two parts to three, with what a term may make of it.

        The parts are alike, so that the term is. Empty for too few
        rows. ``others`` is the number of ranks for parts, and of parts for ranks.
        """
        trial = self.trial
        # Both splits must cut the same rows without a rest.
        multiple = math.prod(_UNITS) * others
        rows = trial.rows[: len(trial.rows) // multiple * multiple]
        if not rows:
            return []
        expected = joined(trial.reference(rows).gradients)
        differences = []
        for number in _UNITS:
            ranks, parts = (number, others) if unit == "rank" else (others, number)
            # Dealt like cards, so that each part has rows of all kinds.
            dealt = [row for start in range(number) for row in rows[start::number]]
            actual = trial.gradients_of(trial.cut(dealt, ranks, parts, equal=True))
            differences.append(joined(actual) - expected)
        two, three = differences
        # Without a difference both are not a number, which no growth is.
        factor = float(three.norm() / two.norm())
        cosine = float(torch.cosine_similarity(two, three, dim=0))
        return [
            Growth(unit, factor, (3 * times - 1) / (2 * times - 1), cosine)
            for times in {1, others}
        ]

    def mean_of_means_in_a_term(self) -> Finding | None:
        """The count whose equal rows are treated right, though others are not.

        A loss that compares rows is wrong for rows with equal counts, too.
        """
        for count in self.counts:
            if count.is_constant:
                continue
            groups = self._groups_with_equal(count)
            if groups and all(self._is_right_in_parts(rows) for rows in groups):
                return Finding(CauseKind.MEAN_OF_MEANS, count=count)
        return None

    def _groups_with_equal(self, count: Count) -> list[list[int]]:
        """The largest groups of rows with equally many terms, for two parts or more.

        Two groups, because one of few rows may be right by chance.
        """
        by_terms: dict[float, list[int]] = {}
        for row in self.trial.rows:
            by_terms.setdefault(count.per_row[row], []).append(row)
        # A part for each rank, because a rank without rows could not take part.
        num_parts = max(2, self.trial.ranks)
        by_terms.pop(0, None)  # rows without terms show nothing
        groups = sorted(by_terms.values(), key=len, reverse=True)[:_NUM_GROUPS]
        in_parts = [rows[: len(rows) // num_parts * num_parts] for rows in groups]
        return [rows for rows in in_parts if rows]

    def _is_right_in_parts(self, rows: list[int]) -> bool:
        trial = self.trial
        # As few runs as show it, because each may start processes: two parts, or a
        # part for each rank.
        parts = 2 if trial.ranks == 1 else 1
        actual = trial.gradients_of(trial.cut(rows, trial.ranks, parts, equal=True))
        expected = trial.reference(rows).gradients
        # A ratio, such as Dice, may have no gradient for rows of one class.
        return not (is_zero(expected) or trial.differing(actual, expected))

    def do_rows_meet(self) -> bool:
        """Whether no weights of the parts' gradients make up that of the batch.

        Also if the weights of the loop and of the batch are the same, and still the
        gradients differ: rows are tied to each other a little.
        """
        right = self._weights(self.expected, self.names)
        if right is not None:
            computed = self._weights(self.actual, self.names)
            return computed is not None and is_close(computed, right, CLOSE)
        # Fewer numbers than twice the parts could be explained by any weights.
        num_numbers = len(joined(self.expected))
        return not self.is_undefined and num_numbers >= 2 * len(self.parts)

    def is_everything(self, names: Sequence[str]) -> bool:
        """Whether these are all parameters that have a gradient."""
        without_gradient = self.trial.invisible(self.expected)
        return set(self.names) <= {*names, *without_gradient}


class ValueEvidence(GradientEvidence):
    """The number of an evaluation that is most wrong, in the place of gradients.

    One number has no weights of parts that could be solved for, so the usual ones are
    tried.
    """

    results = "values"
    weighing = "the evaluation takes the parts, weighted"

    def __init__(self, trial: Trial, comparison: Comparison) -> None:
        super().__init__(trial, comparison)
        self.names = [comparison.name]
        self.wrong = self.names
        # Stricter than the verdict: one of many weights may fit by chance.
        self.tolerance = trial.limit / 10

    def questions(self) -> Mapping[CauseKind, Question]:
        """The causes that a yes shows, with one more."""
        return {
            **super().questions(),
            CauseKind.MEAN_OF_RATIOS: ValueEvidence.is_mean_of_ratios,
        }

    def constant_factor(self, names: Sequence[str]) -> Finding | None:
        """``None``: any two numbers are multiples of each other."""
        return None

    def is_mean_of_ratios(self) -> bool:
        """Whether the loop combines the parts in a usual way; no usual way is right."""
        return self._weights(self.actual, self.names) is not None

    def is_everything(self, names: Sequence[str]) -> bool:
        """False, so that texts name the number."""
        return False

    def _weights(self, total: Gradients, names: Sequence[str]) -> Tensor | None:
        """The first usual weights with which the parts add up."""
        parts = torch.stack([joined(numbers, names) for numbers in self.of_parts])
        size = len(parts)
        means = [1 / size] * size
        last = [0.0] * (size - 1) + [1.0]
        for usual in (*self.weights_of_counts(), means, last):
            weights = torch.tensor(usual, dtype=parts.dtype)
            without_last = pad(weights[:-1], (0, 1))
            for tried in (weights, without_last / without_last.sum()):
                if is_close(tried @ parts, joined(total, names), self.tolerance):
                    return tried
        return None
