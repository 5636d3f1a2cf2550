"""The record on which causes are tested, and the finding that a cause leaves."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from scatterpar.causes.counts import Count
from scatterpar.causes.vectors import is_close

_CLOSE = 1e-3  # how far weights may be from those of a count


class CauseKind(enum.Enum):
    """A cause. Values are its names in reports."""

    NOT_FINITE = "not finite"
    WRONG_WITH_ONE_PART = "wrong with one part"
    RANKS_DIFFER = "ranks differ"
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

    A user of the list overrides what it can answer. Answers may cost runs, so each is
    asked for in the order of the list. By default there is no answer.

    Attributes:
        parts: the rows of all parts.
        counts: what a loss may divide by, the most usual first.
        tolerance: the largest relative error of an explanation.
    """

    parts: Sequence[Sequence[int]]
    counts: Sequence[Count]
    tolerance: float

    def is_finite(self) -> bool:
        """Whether both results are finite."""
        return True

    def is_wrong_with_one_part(self) -> bool:
        """Whether the result is wrong without any split, too."""
        return False

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

    def order_matters(self) -> bool:
        """Whether the parts in another order give another result."""
        return False

    def growths(self) -> Sequence[Growth]:
        """How the difference grows with the numbers of parts and of ranks."""
        return ()

    def count_that_decides(self) -> Count | None:
        """Terms: rows with equally many give a right result, and other rows do not."""
        return None

    def do_rows_meet(self) -> bool:
        """Whether no weights of the parts' results give that of the whole batch."""
        return False

    def counted_as(self, weights: Tensor) -> Count | None:
        """The count that weights of parts are proportional to."""
        # The most usual first: rows of equal lengths fit several counts.
        for count in self.counts:
            terms = [count.of(part) for part in self.parts]
            shares = torch.tensor(terms, dtype=weights.dtype)
            # Weights that cancel have no proportions to compare.
            if not shares.sum() or not weights.sum():
                continue
            if is_close(weights / weights.sum(), shares / shares.sum(), _CLOSE):
                return count
        return None
