"""The record on which causes are tested, and the finding that a cause leaves."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from scatterpar.causes.counts import Count
from scatterpar.causes.vectors import is_close

Question = Callable[[], bool]  # answered by yes or no, perhaps after further runs

# How far weights may be from those of a cause, if they were computed from gradients.
CLOSE = 1e-3


class CauseKind(enum.Enum):
    """A cause. Values are its names in reports."""

    NOT_FINITE = "not finite"
    UNREPEATABLE = "unrepeatable"
    GRADIENT_OF_NO_LOSS = "gradient of no loss"
    ROUNDING = "rounding"
    WRONG_WITH_ONE_PART = "wrong with one part"
    RANKS_DIFFER = "ranks differ"
    NUMBERS_PER_PART = "numbers drawn per part"
    NO_GRADIENT = "no gradient"
    CONSTANT_FACTOR = "constant factor"
    MEAN_OF_MEANS = "mean of means"
    SUM_OF_MEANS = "sum of means"
    ONLY_SOME_PARTS = "only some parts"
    RUNNING_SUM = "running sum"
    OTHER_WEIGHTS = "other weights"
    STATE_BETWEEN_PARTS = "state between parts"
    ONCE_PER_PART = "once per part"
    ROWS_ARE_COMPARED = "rows are compared"
    OUTPUTS_OF_A_PART = "outputs of a part"
    SHAPES_BROADCAST = "shapes broadcast"
    MEAN_OF_RATIOS = "mean of ratios"
    UNKNOWN = "unknown"


class Weights(NamedTuple):
    """The weights of the parts: as computed, and those of the whole batch."""

    computed: Tensor
    right: Tensor


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
    """

    kind: CauseKind
    names: Sequence[str] = field(default=())
    factor: float | None = None
    weights: Weights | None = None
    growth: Growth | None = None
    count: Count | None = None


class SplitEvidence:
    """What is known of a result in parts beside that of the whole batch.

    Those who ask override what they can answer: a look at a step, one at the outputs of
    the pair, and ``splitcheck``. Answers may cost runs, so each is asked for in the
    order of the list. By default there is no answer.

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
        """What a loss may divide by, the most usual first."""
        return ()

    def questions(self) -> Mapping[CauseKind, Question]:
        """The causes that a yes shows, as far as this asker can answer."""
        return {}

    def differing_ranks(self) -> Sequence[str]:
        """The results that differ between processes or replicas."""
        return ()

    def scopes(self) -> Sequence[Sequence[str]]:
        """Names of results that a factor or weights must explain together."""
        return ((),)

    def single_scopes(self) -> Sequence[Sequence[str]]:
        """The names of the wrong results, one by one."""
        return ()

    def factor(self, names: Sequence[str]) -> float | None:
        """The one number that the right result is multiplied by, if there is one."""
        return None

    def weights(self, names: Sequence[str]) -> Weights | None:
        """The weights of the parts, if the results of parts add up to both results."""
        return None

    def growths(self) -> Sequence[Growth]:
        """How the difference grows with the numbers of parts and of ranks."""
        return ()

    def count_that_decides(self) -> Count | None:
        """Terms: rows with equally many give a right result, and other rows do not."""
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
