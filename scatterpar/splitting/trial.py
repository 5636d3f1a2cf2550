"""Which splits of a batch are compared, and what the comparison shows.

::

    whole batch    first_reference()      which random numbers, which dtypes
    in parts       compare()              the limit, and other orders of the rows
    for a cause    reference, results     any other split

``SplitRuns`` runs the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from scatterpar.batch.markers import count_rows
from scatterpar.causes.counts import Count, NamedTensor, counts_of, named_tensors
from scatterpar.causes.vectors import is_close
from scatterpar.spans import Part
from scatterpar.splitting import row_parts
from scatterpar.splitting.check_report import Cause
from scatterpar.splitting.gradients import (
    EXACT,
    Gradients,
    is_zero,
    largest_error,
    listed,
    relative_errors,
    union,
    zeros_of_all,
)
from scatterpar.splitting.operator_modes import Numbers, Shape
from scatterpar.splitting.row_parts import Split
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.split_runs import SplitRuns, described
from scatterpar.splitting.step_run import (
    Settings,
    StepResult,
)

# The largest relative difference that rounding explains, by the coarsest dtype, and if
# not all is computed in float64.
_CAST = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SINGLE = 1e-3
_ROUNDING = 1e-9  # all that float64 leaves
_VANISHED = 1e-3  # of the limit: a gradient below it is rounding
_LARGEST_LIMIT = max(_CAST.values())


class Comparison(NamedTuple):
    """The results of all parts beside that of the whole batch.

    Attributes:
        reference: the result of the whole batch.
        results: the results of the parts, rank by rank.
        worst: the largest relative error of all ranks.
        name: the parameter that has it.
    """

    reference: StepResult
    results: list[StepResult]
    worst: float
    name: str


class Trial:
    """One comparison: how the rows are cut, how the step is run, what may differ.

    Attributes:
        arguments: what the user asks.
        runs: runs the step.
        rows: the numbers of all rows, in the order in which they are cut: in the
            second one that parts allow, if the first shows no difference.
        counts: what a loss may divide by, for each row.
        settings: how the step is run; found out by ``compare``.
        limit: the largest relative difference that rounding explains.
        unseen: sentences about what the comparison cannot show.
    """

    def __init__(self, arguments: SplitArguments) -> None:
        self.arguments = arguments
        self.model = arguments.model
        self.parts = arguments.num_parts
        self.ranks = arguments.ranks
        self.settings = Settings(returns_values=arguments.returns_values)
        self.limit = EXACT
        batch = arguments.batch
        num_rows = count_rows({"batch": batch}, 0, refuse_grad=False)
        num_parts = self.ranks * self.parts
        # Unequal parts of one row each would be equal.
        least = num_parts if arguments.equal else 2 * num_parts
        if num_rows < least:
            raise ValueError(
                f"batch has {num_rows} rows, too few for {num_parts} parts; pass at "
                f"least {least} rows"
            )
        self.runs = SplitRuns(arguments, num_rows)
        # The sizes of parts and ranks do not depend on the order of rows.
        self.rows: Part = list(range(num_rows))
        shares = self.split()
        # The numbers of rows of all parts, and of all ranks, if there are several.
        groups = [[len(part) for part in chain(*shares)]]
        groups.append([sum(map(len, share)) for share in shares])
        groups = [group for group in groups if len(group) > 1]
        # A loss may count in the samples of a data set, which a collator makes tensors.
        counted = batch if arguments.counted is None else arguments.counted
        tensors = named_tensors(counted)
        self.counts = counts_of(tensors, num_rows)
        orders, hidden = row_parts.orders_of_rows(tensors, self.counts, groups)
        self.rows, *self._other_orders = orders
        self.unseen = _hidden_counts(tensors, self.counts, hidden)

    # --- cutting ---

    def split(self) -> Split:
        """All rows, for the numbers of ranks and parts that the user has given."""
        return self.cut(self.rows, self.ranks, self.parts, self.arguments.equal)

    def cut(
        self, rows: Sequence[int], ranks: int, parts: int, equal: bool | None
    ) -> Split:
        """Rows in parts: equally many for ranks, unless ``equal`` says otherwise."""
        shares = row_parts.cut(rows, ranks, equal=equal is not False)
        return [row_parts.cut(share, parts, equal=equal is True) for share in shares]

    # --- comparing ---

    def differing(self, actual: Gradients, expected: Gradients) -> list[str]:
        """The names of the parameters that differ by more than rounding."""
        errors = self._errors(actual, expected)
        return [name for name, error in errors.items() if error > self.limit]

    def invisible(self, gradients: Gradients) -> list[str]:
        """The names of gradients that are zero, or rounding beside the largest."""
        zeros = {name: torch.zeros_like(value) for name, value in gradients.items()}
        visible = self.differing(zeros, gradients)
        return [name for name in gradients if name not in visible]

    def _errors(self, actual: Gradients, expected: Gradients) -> dict[str, float]:
        are_values = self.settings.returns_values
        return relative_errors(actual, expected, self.limit, are_values=are_values)

    def compare(self) -> Comparison:
        """Compare the whole batch with the batch in parts.

        Finds out the settings, and the limit.

        Raises ``ValueError`` if the step leaves no gradient, or is for one batch.
        """
        try:
            comparison = self._most_exact_comparison()
        except Exception as error:
            # A list has no shape: the error is of any kind, but no timeout, after which
            # a second try would wait as long.
            if isinstance(error, TimeoutError):
                raise
            if not self.runs.takes_one_batch(self.rows, self.settings):
                raise
            raise ValueError(
                "step was written for one batch, and gets a list of them; write `for "
                "batch in batches:` around its forward and backward pass"
            ) from error
        reference, results, worst, _ = comparison
        coarsest = reference.coarsest or results[0].coarsest
        if coarsest is not None and worst > self.limit:
            self.limit = max(self.limit, _CAST.get(coarsest, _LARGEST_LIMIT))
            self._tell_limit(f"the step computes in {coarsest}")
            comparison = self._judged(reference, results)
        is_exact = self.settings.in_double and coarsest is None
        if is_exact and _ROUNDING < worst <= self.limit:
            self.unseen.append(
                f"whether a difference of {worst:.0e}, which is more than rounding, "
                f"grows in a trained model; pass one"
            )
        for rows in self._other_orders:
            if comparison.worst <= self.limit:
                self.rows = rows
                comparison = self._in_parts_beside(reference)
        return comparison

    def compare_again(self) -> Comparison:
        """Compare the whole batch and all parts, with the present settings."""
        return self._in_parts_beside(self.reference(self.rows))

    def _in_parts_beside(self, reference: StepResult) -> Comparison:
        results = self.results(self.split())
        if not self.runs.zeros:
            # A leaf may get a gradient in parts, and none in the whole batch.
            everything = [reference, *results]
            zeros = zeros_of_all([result.gradients for result in everything])
            if not zeros:
                raise ValueError(
                    "all gradients have other shapes in parts than in the whole batch, "
                    "as FSDP's flat parameters have on ranks; use fully_shard, whose "
                    "shards are put together"
                )
            self.runs.zeros = zeros
            self.runs.align(everything)
        return self._judged(reference, results)

    def _judged(self, reference: StepResult, results: list[StepResult]) -> Comparison:
        expected = reference.gradients
        errors = [self._errors(result.gradients, expected) for result in results]
        return Comparison(reference, results, *max(map(largest_error, errors)))

    def _most_exact_comparison(self) -> Comparison:
        """Compare in float64; in the user's dtypes if a kernel insists on one."""
        settings = self.settings
        unseen = list(self.unseen)
        try:
            return self._in_parts_beside(self.first_reference())
        except TimeoutError:
            raise
        except Exception as error:  # if it is no dtype, the step fails again
            problem = str(error).partition("\n")[0]
        # What was found out in float64 may be otherwise.
        self.settings = replace(settings, in_double=False)
        self.unseen = unseen
        self.limit = _SINGLE
        self._tell_limit(f"the step does not run in float64 ({problem})")
        return self._in_parts_beside(self.first_reference())

    def first_reference(self) -> StepResult:
        """The gradient of the whole batch. Finds out which random numbers are used.

        Raises ``ValueError`` if the step leaves no gradient.
        """
        result = self.reference(self.rows)
        as_drawn = result
        if result.has_drawn:
            as_drawn = self.reference(self.rows, numbers=Numbers.AS_DRAWN)
        if not self.settings.returns_values and is_zero(as_drawn.gradients):
            raise ValueError(
                "step left no gradient on a parameter of the model; call backward() "
                "for the model that step gets, and do not end with zero_grad()"
            )
        if result.has_drawn:
            result = self._with_steady_numbers(result, as_drawn)
        return result

    def _with_steady_numbers(
        self, result: StepResult, as_drawn: StepResult
    ) -> StepResult:
        """The result with random numbers that do not depend on the split.

        It is ``result``, with constant ones, unless a gradient vanishes with them, as
        that below a classifier whose weights the step draws.
        """
        of_fewer_rows = Counter[Shape]()
        if result.draws:
            of_fewer_rows = self.reference(self.rows[: len(self.rows) // 2]).draws
        if self._vanished(result, as_drawn):
            # Equal weights of classes, for one, leave no gradient on what is below.
            # Draws that a batch of fewer rows has as well are weights.
            shapes = frozenset(result.draws & of_fewer_rows)
            self.settings = replace(
                self.settings, numbers=Numbers.VARIED, fixed_shapes=shapes
            )
            result = self.reference(self.rows)
        vanished = self._vanished(result, as_drawn)
        if len(vanished) == len(as_drawn.gradients) or is_zero(result.gradients):
            raise ValueError(
                "the gradient is zero with the constant numbers that random operators "
                "give in splitcheck, so nothing can be compared; draw what step draws "
                "before, and pass it in batch"
            )
        if vanished:
            self.unseen.append(
                f"the gradient of {listed(vanished)}, which is zero with constant "
                f"random numbers"
            )
        # Initial weights are as many for fewer rows.
        if result.draws != of_fewer_rows:
            self.unseen.append(
                "what random numbers of each row decide, such as weights or masks, "
                "since all rows get the same numbers; draw them before, and pass them "
                "in batch"
            )
        return result

    def _vanished(self, result: StepResult, as_drawn: StepResult) -> list[str]:
        """The parameters whose gradient is not finite, or rounding beside another."""
        vanished = []
        for name, gradient in as_drawn.gradients.items():
            # Norms, because a gradient may be moved among the entries by other numbers.
            size = float(result.gradients.get(name, torch.zeros(())).norm())
            is_rounding = size < _VANISHED * self.limit * float(gradient.norm())
            if is_rounding or not math.isfinite(size):
                vanished.append(name)
        return vanished

    # --- running, with the present settings ---

    def reference(self, rows: Part, **settings: Any) -> StepResult:
        """The result for rows as one part; ``settings`` are others than the present."""
        return self.runs.of_whole(rows, replace(self.settings, **settings))

    def results(self, split: Split) -> list[StepResult]:
        """The results of a split, rank by rank."""
        return self.runs.of_parts(split, self.settings)

    def gradients_of(self, split: Split) -> Gradients:
        """The gradients of a split on rank 0."""
        return self.results(split)[0].gradients

    def first_meeting(self) -> str:
        """The first module whose outputs for some rows depend on the other rows.

        Empty if there is none.
        """
        first_part = self.split()[0][0]
        of_all = self.reference(self.rows, watch_modules=True).outputs
        of_part = self.reference(first_part, watch_modules=True).outputs
        size = len(first_part)
        for name, expected in of_all.items():
            # The first entries are of the first rows, also of several views: each view
            # behind the other, or row by row.
            of_first_rows = expected[:size]
            actual = of_part.get(name, expected)[:size]
            has_rows = actual.shape == of_first_rows.shape
            if has_rows and not is_close(actual, of_first_rows, self.limit):
                return name
        return ""

    # --- what the comparison cannot show ---

    def _note(self, results: Sequence[StepResult]) -> str:
        """Sentences about what ``results``, that of the whole batch first, hide."""
        sentences = list(self.unseen)
        uncompared = union(result.uncompared for result in results)
        if uncompared:
            sentences.append(
                f"the gradient of {', '.join(uncompared)}: not compared, because no "
                f"optimizer in step has it, or its shape depends on the split"
            )
        if not self.arguments.returns_values:
            # Frozen ones have no gradient in any loop.
            trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
            hidden = self.invisible(results[0].gradients)
            names = [name for name in hidden if name in trained]
            if names:
                sentences.append(
                    f"the gradient of {listed(names)}, which is zero beside others"
                )
        return "; ".join(sentences)

    def _tell_limit(self, reason: str) -> None:
        reason = reason.replace("torch.", "")
        self.unseen.append(
            f"an error below {self.limit:.0e} of a gradient, since {reason}"
        )

    def report(self, comparison: Comparison, cause: Cause) -> dict[str, Any]:
        """The attributes of ``SplitReport``."""
        return {
            "rows": len(self.rows),
            "sizes": described(self.split()),
            "ranks": self.ranks,
            "worst": comparison.worst,
            "limit": self.limit,
            "cause": cause.name,
            "why": cause.why,
            "remedy": cause.remedy,
            "note": self._note([comparison.reference, *comparison.results]),
        }


def _hidden_counts(
    tensors: Sequence[NamedTensor], counts: Sequence[Count], hidden: Sequence[Count]
) -> list[str]:
    """Sentences about counts that this batch cannot show."""
    is_sequence = [t.ndim > 1 and not t.is_floating_point() for _, t in tensors]
    if any(is_sequence) and all(count.is_constant for count in counts):
        return [
            "whether labels are counted right, since all rows have equally many; "
            "give some rows labels of -100"
        ]
    sentences: dict[str, str] = {}  # by the tensor: its first count is the usual
    for count in hidden:
        # A sum has the path of its tensor in its words.
        place = "" if count.is_sum else f" in {count.path}"
        sentences.setdefault(
            count.path,
            f"whether {count.words} are counted right{place}, since all parts have "
            f"equally many per row, or some part has none",
        )
    return list(sentences.values())
