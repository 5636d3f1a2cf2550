"""The record on which causes are tested, and the finding that a cause leaves."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.causes.counts import Count
from scatterpar.causes.vectors import is_close

# How far weights may be from those of a cause, if they were computed from gradients.
CLOSE = 1e-3


class CauseKind(enum.Enum):
    """The causes, in the order of their questions. The first that fits counts.

    Values are their names in reports.
    """

    # First: nothing can be compared with NaN.
    NOT_FINITE = "not finite"
    # Before all others, because they compare results.
    UNREPEATABLE = "unrepeatable"
    # Before rounding, because this gradient is exact, however small it is.
    GRADIENT_OF_NO_LOSS = "gradient of no loss"
    # From here on all compare with the limit that rounding explains.
    ROUNDING = "rounding"
    # No split explains the next two.
    WRONG_WITH_ONE_PART = "wrong with one part"
    RANKS_DIFFER = "ranks differ"
    # The result is right if all parts draw the same numbers.
    NUMBERS_PER_PART = "numbers drawn per part"
    # One factor, or other weights of the parts, in all results or in all that are
    # wrong: so this question finds the next ones, too. Before state, because a running
    # sum of losses is both. It needs no other split, so it is also cheaper.
    CONSTANT_FACTOR = "constant factor"
    NO_GRADIENT = "no gradient"
    SUM_OF_MEANS = "sum of means"
    ONLY_SOME_PARTS = "only some parts"
    RUNNING_SUM = "running sum"
    STATE_BETWEEN_PARTS = "state between parts"
    ONCE_PER_PART = "once per part"
    # A factor or weights in a single result, as one of several losses may be wrong. It
    # comes after all of these, because it may fit by chance.
    OTHER_WEIGHTS = "other weights"
    # In one of several terms; the others are right.
    MEAN_OF_MEANS = "mean of means"
    # No weights make up the whole batch: why they do not.
    ROWS_ARE_COMPARED = "rows are compared"
    OUTPUTS_OF_A_PART = "outputs of a part"
    SHAPES_BROADCAST = "shapes broadcast"
    UNKNOWN = "unknown"


class Weights(NamedTuple):
    """The weights of the parts: as computed, and those of the whole batch."""

    computed: Tensor
    right: Tensor


_ALIKE = 0.9  # the cosine of two differences that have one reason
_ROUGHLY = 0.15  # how far a growth may be from that of a term per part, relatively
_SAME_GROWTH = 0.05  # two growths that cannot be told apart


class Growth(NamedTuple):
    """How a difference grows with the number of parts or ranks.

    Attributes:
        unit: ``part`` or ``rank``, of which there are two, then three.
        factor: the growth of the difference.
        expected: its growth if a term counts once for each of them.
        cosine: of the angle between the two differences.
    """

    unit: str
    factor: float
    expected: float
    cosine: float

    @property
    def is_of_a_term(self) -> bool:
        """Whether a term that counts in each part or rank explains it."""
        # Without growth any difference would fit.
        is_flat = math.isclose(self.expected, 1, abs_tol=_SAME_GROWTH)
        is_near = math.isclose(self.factor, self.expected, rel_tol=_ROUGHLY)
        is_expected = is_near and math.isfinite(self.factor)
        # The same direction, because any difference may grow as fast by chance.
        return is_expected and not is_flat and self.cosine >= _ALIKE


@dataclass(frozen=True)
class Finding:
    """A cause, and the figures that show it.

    Attributes:
        kind: the cause.
        names: the parameters, or other results, that show it; empty for all.
        factor: of the right result, if one number explains it.
        weights: of the parts, if they explain it.
        growth: with the number of parts.
        count: terms that decide whether rows are treated right.
        difference: between two results that the cause makes different, relatively.
    """

    kind: CauseKind
    names: Sequence[str] = field(default=())
    factor: float | None = None
    weights: Weights | None = None
    growth: Growth | None = None
    count: Count | None = None
    difference: float = 0.0


# Asked of the evidence. The answer is yes or no, or a finding with figures; perhaps
# after further runs.
Question = Callable[[Any], bool | Finding | None]


class SplitEvidence:
    """The evidence about a result in parts beside that of the whole batch.

    Those who ask override what they can answer: a look at a step, one at the outputs of
    the pair, and ``splitcheck``. Answers may cost runs, so each is asked for in the
    order of ``CauseKind``. By default there is no answer.

    Attributes:
        parts: the rows of all parts.
        tolerance: the largest relative error of an explanation.
        weight_error: how far weights of one cause may be apart.
        passed_over: errors of a cause after which the next one is tested.
    """

    parts: Sequence[Sequence[int]]
    tolerance: float
    weight_error: float = CLOSE
    passed_over: tuple[type[Exception], ...] = (Exception,)

    @property
    def counts(self) -> Sequence[Count]:
        """The numbers that a loss may divide by, the most usual first."""
        return ()

    def weights(self, names: Sequence[str]) -> Weights | None:
        """The weights of the parts, if the results of parts add up to both results."""
        return None

    def terms_of(self, count: Count) -> list[float]:
        """The number of terms in each part."""
        return [count.of(part) for part in self.parts]

    def weights_of_counts(self) -> Iterator[list[float]]:
        """Yield the weights of a mean over rows, of means over other terms, of a sum.

        With equally many terms in each row the second is the first.
        """
        for count in self.counts:
            terms = self.terms_of(count)
            total = sum(terms)
            # A constant count is the mean over rows, which comes first.
            if total and not (count.path and count.is_constant):
                yield [number / total for number in terms]
        yield [1.0] * len(self.parts)

    def counted_as(self, weights: Tensor) -> Count | None:
        """The count that weights of parts are proportional to."""
        if not weights.sum():  # weights that cancel have no proportions
            return None
        proportions = weights / weights.sum()
        # The most usual first: rows of equal lengths fit several counts.
        for count in self.counts:
            shares = torch.tensor(self.terms_of(count), dtype=weights.dtype)
            if not shares.sum():
                continue
            if is_close(proportions, shares / shares.sum(), self.weight_error):
                return count
        return None
