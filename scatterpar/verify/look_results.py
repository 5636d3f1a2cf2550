"""The results of one look's runs; more runs are made when a cause needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from scatterpar.causes.counts import (
    Count,
    NamedTensor,
    counts_of,
    named_tensors,
)
from scatterpar.causes.evidence import SplitEvidence, Weights
from scatterpar.objects.references import read_attribute
from scatterpar.step.request import Request
from scatterpar.verify.look_rounding import ComparedResults
from scatterpar.verify.measurements import losses_of_parts, outputs_of
from scatterpar.verify.results import Result, weighted_sum
from scatterpar.verify.rows import positions_of, unbound

# With whole_batch=True, too, a number is computed from the rows of a micro-batch.
NUMBER_REMEDY = (
    "return from forward what the number is computed from, one entry per row, and "
    "compute the number in the criterion"
)


@dataclass(frozen=True, eq=False)
class LookResults(ComparedResults, SplitEvidence):
    """The losses of some rows, at once and in parts, and how the engine combines them.

    It has the attributes of ``ComparedResults``, too.

    Attributes:
        ignored: labels that the loss may ignore.
        draws_steadily: the parts drew as many random numbers as all rows at once did.
        moved: the names of state that each part has moved.
    """

    ignored: Sequence[int]
    draws_steadily: bool
    moved: Sequence[str]

    weight_error = 1e-9  # the weights of a count are computed, not measured
    passed_over = ()  # a look that fails is inconclusive

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
        """The numbers that the loss may divide by, the most usual first."""
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


def name_of_loss(request: Request) -> str:
    """The criterion, as texts name it."""
    criterion = request.criterion
    if criterion is None:
        return request.loss_name
    function = unbound(criterion)
    name = read_attribute(function, "__qualname__", type(function).__name__)
    if name.startswith("the "):  # it has a name for texts
        return str(name)
    return "the criterion" if name == "criterion" else f"the criterion {name}"
