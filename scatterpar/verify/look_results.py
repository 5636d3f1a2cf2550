"""What the runs of one look gave; further runs are made when a cause asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from scatterpar.batch.batch import batch_of
from scatterpar.causes.counts import (
    Count,
    NamedTensor,
    counts_of,
    named_tensors,
)
from scatterpar.causes.evidence import SplitEvidence, Weights
from scatterpar.numerics.comparison import (
    SMALLEST_SCALE,
    Inconclusive,
    OnlyRounding,
    magnitudes,
)
from scatterpar.numerics.nudges import NUM_NUDGES, rounding_limit
from scatterpar.objects.references import read_attribute
from scatterpar.spans import Part
from scatterpar.step.loss_weights import is_smoothed, term_counts
from scatterpar.step.request import Request
from scatterpar.verify.measurements import losses_of_parts, outputs_of
from scatterpar.verify.results import Result, weighted_sum
from scatterpar.verify.rows import Parts, positions_of, unbound
from scatterpar.verify.runs import Runs

# With whole_batch=True, too, a number is computed from the rows of a micro-batch.
NUMBER_REMEDY = (
    "return from forward what the number is computed from, one entry per row, and "
    "compute it in the criterion"
)

# So many gradients of rows tell their size.
_MAX_ROWS_ALONE = 16

# If rounding changes a gradient by more than this part, it is nothing but rounding.
_NOTHING_BUT_ROUNDING = 0.4


@dataclass(frozen=True, eq=False)
class LookResults(SplitEvidence):
    """The losses of some rows, at once and in parts, and how the engine combines them.

    Further runs are made when they are asked for.

    Attributes:
        request: the call, with the batch.
        parts: the rows of each part.
        step_weights: the factors by which the engine multiplies the losses of the
            parts.
        expected: the result for all rows at once.
        actual: the sum of the results of the parts, as the engine combines them.
        tolerance: the largest difference between two right results.
        ignored: labels that the loss may ignore.
        runs: makes further runs.
        draws_steadily: the parts drew as many random numbers as all rows at once did.
        moved: the names of state that each part has moved.
    """

    request: Request
    parts: Parts
    step_weights: Sequence[float]
    expected: Result
    actual: Result
    tolerance: float
    ignored: Sequence[int]
    runs: Runs
    draws_steadily: bool
    moved: Sequence[str]

    weight_error = 1e-9  # the weights of a count are computed, not measured
    passed_over = ()  # a look that fails is inconclusive

    @property
    def num_rows(self) -> int:
        """The number of rows of all parts."""
        return sum(map(len, self.parts))

    @property
    def rows(self) -> Part:
        """All rows in the order of the parts, so that outputs can be cut into these."""
        return list(chain(*self.parts))

    @cached_property
    def difference(self) -> float:
        """The relative difference between the results in parts and at once."""
        return self.actual.difference_from(self.expected)

    @cached_property
    def limit(self) -> float:
        """The largest difference that rounding explains. It may cost runs.

        Raises:
            OnlyRounding: the gradient is nothing else.
        """
        # The cheap bound first: each nudge costs a run. NaN is no rounding.
        if self.difference <= self.tolerance or not self.actual.is_finite:
            return self.tolerance
        by_rounding = 0.0
        if self.difference < math.inf:  # infinite if the gradient at once is zero
            by_rounding = _difference_by_rounding(self)
        if self.difference > by_rounding and _do_rows_cancel(self):
            return self.difference
        return max(self.tolerance, by_rounding)

    @cached_property
    def of_replica(self) -> Result:
        """The replica's result for all rows at once."""
        return self.runs.at_once(self.rows)

    @cached_property
    def results_of_parts(self) -> Sequence[Result]:
        """The result of each part from the same state, without weights."""
        return [self.runs.at_once(part) for part in self.parts]

    def in_parts(self, prepare: Callable[[], None], *, scale: float = 1.0) -> Result:
        """The combined result of the parts; ``prepare`` is called before each."""
        weights = self.step_weights
        run = self.runs.run(self.parts, weights=weights, prepare=prepare, scale=scale)
        return run.result

    @cached_property
    def outputs(self) -> Sequence[Any]:
        """The replica's output for all rows, then those for each part."""
        return outputs_of(self.runs, [self.rows, *self.parts])

    @cached_property
    def loss_of_output(self) -> Result | None:
        """The criterion's loss of the output for all rows, and its gradients by that.

        ``None`` without a criterion, or if it asks for gradients by inputs or
        parameters: it cannot be called with outputs that have no graph, as
        ``whole_batch`` does.
        """
        if self.request.criterion is None:
            return None
        try:
            (result,) = losses_of_parts(self.runs, self.outputs[0], [self.rows])
        except RuntimeError:
            return None
        return result

    @cached_property
    def counts(self) -> list[Count]:
        """What the loss may divide by, the most usual first."""
        rows = self.rows
        inputs, targets = self.request.batches[0].select(rows).unwrapped(copy=True)
        tensors = named_tensors(targets, "targets")
        tensors += named_tensors(inputs, "inputs")
        dim = self.request.dim
        # Counts are read along dimension 0.
        by_row = [
            NamedTensor(path, tensor.movedim(dim, 0))
            for path, tensor in tensors
            if -tensor.ndim <= dim < tensor.ndim and tensor.size(dim) == len(rows)
        ]
        return counts_of(by_row, len(rows), self.ignored)

    def terms_of(self, count: Count) -> list[float]:
        """The number of terms in each part."""
        # Rows are counted in the order of the parts.
        return [count.of(positions) for positions in positions_of(self.parts)]

    def is_expected(self, result: Result) -> bool:
        """Whether a result differs from what was expected by rounding alone."""
        return result.difference_from(self.expected) <= self.limit

    def weights(self, names: Sequence[str] = ()) -> Weights | None:
        """The weights of the step, and those with which the parts add up."""
        if self.request.whole_batch:  # which has one loss
            return None
        results = self.results_of_parts
        # Of one part any weight might fit. A part that is NaN has to have none.
        tells = [result.has_gradient or not result.is_finite for result in results]
        if sum(tells) < 2:
            return None
        for right in self.weights_of_counts():
            if self.is_expected(weighted_sum(results, right)):
                pair = torch.tensor([self.step_weights, right], dtype=torch.float64)
                return Weights(*pair)
        return None


def _difference_by_rounding(results: LookResults) -> float:
    """The difference that rounding makes in the replica's result for all rows.

    It is the whole difference of the look if a nudge turns what was expected into
    the result in parts: a ReLU at zero was open in one of them.

    Raises:
        OnlyRounding: the gradient is nothing else, as for a student that starts as
            its teacher, or a constant loss.
    """
    of_replica = results.of_replica.difference_from(results.expected)
    is_replica_right = of_replica <= results.tolerance
    runs = results.runs
    effects: list[float] = []
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
        by_rounding = rounding_limit(effects, results.difference)
        if results.difference <= by_rounding or runs.user_code.is_late():
            break
    if results.difference <= by_rounding and by_rounding > _NOTHING_BUT_ROUNDING:
        raise OnlyRounding("its gradient is nothing but rounding")
    return by_rounding


def _do_rows_cancel(results: LookResults) -> bool:
    """Whether the results of rows nearly cancel, so that rounding explains it.

    ::

        row         1        2        3        sum
        gradient    2/3     -1/3     -1/3      1e-17, or -2e-17 in another order

    Each row's gradient is rounded by its own size, however small the sum is.
    """
    rows = results.rows[:: max(1, len(results.rows) // _MAX_ROWS_ALONE)]
    try:
        alone = [results.runs.at_once([row]) for row in rows]
    except Exception:  # user code may need several rows
        return False
    num_rows = 1 if results.request.is_mean else len(results.rows)
    rounding = results.runs.rounding.limit * num_rows / len(rows)
    of_loss = rounding * sum(abs(result.loss) for result in alone)
    expected = results.expected
    scale = max(abs(expected.loss), SMALLEST_SCALE)
    error = abs(results.actual.loss - expected.loss)
    if error > max(of_loss, results.tolerance * scale):
        return False
    pairs = zip(results.actual.gradients, expected.gradients, strict=True)
    errors = magnitudes([actual - at_once for actual, at_once in pairs])
    by_row = [magnitudes(result.gradients) for result in alone]
    scales = magnitudes(expected.gradients)
    smallest = SMALLEST_SCALE * max(scales, default=0.0)
    for error, scale, sizes in zip(
        errors, scales, zip(*by_row, strict=True), strict=True
    ):
        by_scale = results.tolerance * max(scale, smallest)
        if error > max(rounding * sum(sizes), by_scale):
            return False
    return True


def name_of(request: Request) -> str:
    """The criterion, as texts name it."""
    criterion = request.criterion
    if criterion is None:
        return request.loss_name
    function = unbound(criterion)
    name = read_attribute(function, "__qualname__", type(function).__name__)
    return "the criterion" if name == "criterion" else f"the criterion {name}"


def weighted_parts(request: Request, parts: Parts) -> tuple[Parts, Sequence[float]]:
    """The parts, and the factors by which the engine would multiply their losses.

    Raises:
        Inconclusive: no row has a term.
    """
    if not request.is_mean:  # with whole_batch, too
        return parts, [1.0] * len(parts)
    spans = [(rows.start, rows.stop) for rows in positions_of(parts)]
    (batch,) = request.batches
    # Terms are counted in the pieces, since these rows are no slices of the batch.
    pieces = [batch.select(part).unwrapped() for part in parts]
    no_batch = batch_of(None, None, request.rows, request.dim)
    terms = term_counts(replace(request, batches=[no_batch]), spans, pieces)
    total = sum(terms)
    if not total:
        raise Inconclusive("none of the rows adds anything")
    if is_smoothed(request) and 0.0 in terms:
        # They have a loss, but not by themselves: its mean is over no terms.
        return [list(chain(*parts))], [1.0]
    return parts, [count / total for count in terms]
