"""Decide whether rounding explains a difference: in which order, and by what.

::

    asked         says yes if                          never says yes
    tolerance     the difference is one that two       of NaN or infinity
                  right results of this format have
    nudges        parameters changed by rounding       of a part that is not finite
                  make as large a difference
    rows alone    they add up to their result at       of a row that is not finite; of a
                  once, and are larger than it by as   difference that float64 confirms
                  much as rounding is enlarged
    float64       the look in float64 says yes, by     if user code fails in float64,
                  the three above                      which is no answer

The first yes counts, except that of rows alone. Before that yes, and before a refusal,
the look is asked again in float64 if it is in a narrower format (``first_report`` of
``look``), and what float64 says counts. Each finds what the others do not: nudges a
ReLU that rounding opens, rows alone a sum that is zero but for rounding, float64 the
choices within a row that cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

from scatterpar.numerics.comparison import (
    SMALLEST_SCALE,
    OnlyRounding,
    magnitudes,
)
from scatterpar.numerics.nudges import NUM_NUDGES, rounding_limit
from scatterpar.spans import Part
from scatterpar.step.request import Request
from scatterpar.verify.choice import weighted_parts
from scatterpar.verify.results import Result, weighted_sum
from scatterpar.verify.rows import Parts
from scatterpar.verify.runs import Runs

# So many rows tell the size of all.
_MAX_ROWS_ALONE = 16

# If rounding changes a gradient by more than this part, it is nothing but rounding.
_NOTHING_BUT_ROUNDING = 0.4


@dataclass(frozen=True, eq=False)
class ComparedResults:
    """The results of some rows, at once and in parts, and how far rounding brings them
    apart.

    Further runs are made when they are asked for.

    Attributes:
        request: the call, with the batch.
        parts: the rows of each part.
        step_weights: the factors by which the engine multiplies the losses of the
            parts.
        expected: the result for all rows at once.
        actual: the sum of the results of the parts, as the engine combines them.
        tolerance: the largest difference between two right results.
        runs: makes further runs.
    """

    request: Request
    parts: Parts
    step_weights: Sequence[float]
    expected: Result
    actual: Result
    tolerance: float
    runs: Runs

    @property
    def num_rows(self) -> int:
        """The number of rows of all parts."""
        return sum(map(len, self.parts))

    @property
    def rows(self) -> Part:
        """All rows in the order of the parts, so that outputs can be cut into these."""
        return list(chain(*self.parts))

    @cached_property
    def of_replica(self) -> Result:
        """The replica's result for all rows at once."""
        return self.runs.at_once(self.rows)

    @cached_property
    def difference(self) -> float:
        """The relative difference between the results in parts and at once."""
        return self.actual.difference_from(self.expected)

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the results are as near as two right ones of this format."""
        return self.difference <= self.tolerance

    @cached_property
    def limit(self) -> float:
        """The largest difference that rounding explains. It may cost runs.

        Raises:
            OnlyRounding: the gradient is nothing else.
        """
        if self.rests_on_rows:
            return self.difference
        return max(self.tolerance, self._limit_of_nudges)

    def is_expected(self, result: Result) -> bool:
        """Whether a result differs from what was expected by rounding alone."""
        return result.difference_from(self.expected) <= self.limit

    @cached_property
    def rests_on_rows(self) -> bool:
        """Whether rows alone explain the difference, and nothing else does."""
        if self.is_within_tolerance or not self.actual.is_finite:
            return False
        if self.difference <= self._limit_of_nudges:
            return False
        return _do_rows_cancel(self)

    @cached_property
    def _limit_of_nudges(self) -> float:
        # The cheap bound first: each nudge costs a run.
        if self.is_within_tolerance or not self.actual.is_finite:
            return 0.0
        # It is infinite if the gradient at once is zero.
        return _difference_by_nudges(self) if self.difference < math.inf else 0.0


def _difference_by_nudges(results: ComparedResults) -> float:
    """The difference that nudges make in the replica's result for all rows.

    It is the whole difference of the look if a nudge turns what was expected into
    the result in parts: a ReLU at zero was open in one of them. It is zero if the
    losses differ by more than nudges move them: rounding may move a gradient by all
    that it is, but not its loss.

    Raises:
        OnlyRounding: the gradient is nothing else, as for a student that starts as
            its teacher, or a constant loss.
    """
    of_replica = results.of_replica.difference_from(results.expected)
    is_replica_right = of_replica <= results.tolerance
    runs = results.runs
    effects: list[float] = []
    effects_on_loss: list[float] = []
    by_rounding = 0.0
    for number in range(NUM_NUDGES):
        nudge = partial(runs.nudge, number)
        run = runs.run([results.rows], prepare=nudge)
        nudged = run.result
        turns_into_actual = nudged.difference_from(results.actual) <= results.tolerance
        if is_replica_right and turns_into_actual:
            return results.difference
        # From the replica's own result: the user's may be rounded otherwise.
        effects.append(nudged.difference_from(results.of_replica))
        effects_on_loss.append(nudged.loss_difference_from(results.of_replica))
        by_rounding = rounding_limit(effects, results.difference)
        if results.difference <= by_rounding or runs.user_code.is_late():
            break
    if results.difference > by_rounding:
        return by_rounding
    of_losses = results.actual.loss_difference_from(results.expected)
    limit_of_losses = rounding_limit(effects_on_loss, of_losses)
    are_losses_equal = of_losses <= max(results.tolerance, limit_of_losses)
    if not are_losses_equal:
        return 0.0
    if by_rounding > _NOTHING_BUT_ROUNDING:
        raise OnlyRounding("its gradient is nothing but rounding")
    return by_rounding


def _do_rows_cancel(results: ComparedResults) -> bool:
    """Whether the results of rows nearly cancel, so that rounding explains it.

    ::

        row         1        2        3        sum
        gradient    2/3     -1/3     -1/3      1e-17, or -2e-17 in another order

    Each row's gradient is rounded by its own size, however small the sum is. Rows that
    do not add up to their result at once say nothing of its summands: in a ratio of
    sums a row by itself may be as large as its own divisor is small.
    """
    runs = results.runs
    rows = results.rows
    sample = rows[:: max(1, len(rows) // _MAX_ROWS_ALONE)]
    try:
        parts, weights = weighted_parts(results.request, [[row] for row in sample])
        alone = [runs.at_once(part) for part in parts]
        at_once = runs.at_once(sample)
    except Exception:  # user code may need several rows
        return False
    # A mean of some rows is as large as that of all rows, and a sum is not.
    rows_per_summand = 1.0 if results.request.is_mean else len(rows) / len(sample)
    ways = [(weights, rows_per_summand)]
    if results.request.whole_batch:  # which has no weights: it may be a mean, too
        ways.append(([1 / len(parts)] * len(parts), 1.0))
    for weights, factor in ways:
        summands: list[Result] = []
        for result, weight in zip(alone, weights, strict=True):
            if weight:  # a row without a term may be NaN by itself
                summands.append(weighted_sum([result], [weight]))
        rounding = runs.rounding.limit * factor
        summed = weighted_sum(summands)
        if _is_rounding_of(summands, summed, at_once, rounding, results.tolerance):
            return _is_rounding_of(
                summands, results.actual, results.expected, rounding, results.tolerance
            )
    return False


def _is_rounding_of(
    summands: Sequence[Result],
    actual: Result,
    expected: Result,
    rounding: float,
    tolerance: float,
) -> bool:
    """Whether two results differ by no more than ``rounding`` of such summands, or than
    two right results.
    """
    compared = [actual, expected, *summands]
    if not (summands and all(result.is_finite for result in compared)):
        return False
    size = sum(abs(summand.loss) for summand in summands)
    scale = max(abs(expected.loss), SMALLEST_SCALE)
    error = abs(actual.loss - expected.loss)
    if not error <= max(rounding * size, tolerance * scale):
        return False
    pairs = zip(actual.gradients, expected.gradients, strict=True)
    errors = magnitudes([left - right for left, right in pairs])
    scales = magnitudes(expected.gradients)
    smallest = SMALLEST_SCALE * max(scales, default=0.0)
    sizes = zip(*(magnitudes(summand.gradients) for summand in summands), strict=True)
    for error, scale, sizes_of_leaf in zip(errors, scales, sizes, strict=True):
        by_scale = tolerance * max(scale, smallest)
        if not error <= max(rounding * sum(sizes_of_leaf), by_scale):
            return False
    return True
