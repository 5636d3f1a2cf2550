"""Choose the splits of a batch, and compare them.

::

    whole batch    first_reference    which random numbers, which dtypes
    in parts       compare            the limit, and other orders of the rows
    for a cause    runs               any other split

``SplitRuns`` runs the step. ``report_of`` says what a comparison shows, and what not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch

from scatterpar.batch.markers import count_rows
from scatterpar.causes.counts import Count, NamedTensor, counts_of, named_tensors
from scatterpar.spans import Part
from scatterpar.splitting import row_parts
from scatterpar.splitting.gradients import (
    EXACT,
    Gradients,
    largest_error,
    relative_errors,
    zeros_of_all,
)
from scatterpar.splitting.row_parts import Split
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.split_runs import SplitRuns
from scatterpar.splitting.steady_numbers import first_reference
from scatterpar.splitting.step_run import StepResult

# The largest relative difference that rounding explains, by the coarsest dtype, and if
# not all is computed in float64.
_CAST = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SINGLE = 1e-3
_ROUNDING = 1e-9  # all that float64 leaves
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
        runs: runs the step, in the way that ``compare`` finds out.
        rows: the numbers of all rows, in the order in which they are cut: in the
            second one that parts allow, if the first shows no difference.
        counts: what a loss may divide by, for each row.
        limit: the largest relative difference that rounding explains.
        unseen: sentences about what the comparison cannot show.
    """

    def __init__(self, arguments: SplitArguments) -> None:
        self.arguments = arguments
        self.model = arguments.model
        self.num_parts = arguments.num_parts
        self.ranks = arguments.ranks
        self.limit = EXACT
        batch = arguments.batch
        num_rows = count_rows({"batch": batch}, 0, refuse_grad=False)
        of_all_ranks = self.ranks * self.num_parts
        # Unequal parts of one row each would be equal.
        least = of_all_ranks if arguments.equal else 2 * of_all_ranks
        if num_rows < least:
            raise ValueError(
                f"batch has {num_rows} rows, too few for {of_all_ranks} parts; pass at "
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

    def split(self) -> Split:
        """All rows, for the numbers of ranks and parts that the user has given."""
        return self.cut(self.rows, self.ranks, self.num_parts, self.arguments.equal)

    def cut(
        self, rows: Sequence[int], ranks: int, parts: int, equal: bool | None
    ) -> Split:
        """Rows in parts: equally many for ranks, unless ``equal`` says otherwise."""
        shares = row_parts.cut_into_parts(rows, ranks, equal=equal is not False)
        return [
            row_parts.cut_into_parts(share, parts, equal=equal is True)
            for share in shares
        ]

    def differing(self, actual: Gradients, expected: Gradients) -> list[str]:
        """The names of the parameters that differ by more than rounding."""
        errors = self._errors(actual, expected)
        return [name for name, error in errors.items() if not error <= self.limit]

    def invisible(self, gradients: Gradients) -> list[str]:
        """The names of gradients that are zero, or rounding beside the largest."""
        zeros = {name: torch.zeros_like(value) for name, value in gradients.items()}
        visible = self.differing(zeros, gradients)
        return [name for name in gradients if name not in visible]

    def _errors(self, actual: Gradients, expected: Gradients) -> dict[str, float]:
        return relative_errors(actual, expected, self.limit)

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
            if not self.runs.takes_one_batch(self.rows):
                raise
            raise ValueError(
                "step was written for one batch, and gets a list of batches; write "
                "`for batch in batches:` around its forward and backward pass"
            ) from error
        reference, results, worst, _ = comparison
        coarsest = reference.coarsest or results[0].coarsest
        if coarsest is not None and not worst <= self.limit:
            self.limit = max(self.limit, _CAST.get(coarsest, _LARGEST_LIMIT))
            self._tell_limit(f"the step computes in {coarsest}")
            comparison = self._judged(reference, results)
        is_exact = self.runs.settings.in_double and coarsest is None
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
        return self._in_parts_beside(self.runs.reference(self.rows))

    def _in_parts_beside(self, reference: StepResult) -> Comparison:
        results = self.runs.results(self.split())
        if not self.runs.zeros:
            # A leaf may get a gradient in parts, and none in the whole batch.
            everything = [reference, *results]
            zeros = zeros_of_all([result.gradients for result in everything])
            if not zeros:
                raise ValueError(
                    "the gradients of parts have other shapes than the gradient of "
                    "the whole batch, for example because FSDP flattens parameters; "
                    "use fully_shard, whose shards splitcheck joins"
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
        settings = self.runs.settings
        unseen = list(self.unseen)
        try:
            return self._first_comparison()
        except TimeoutError:
            raise
        except Exception as error:  # if it is no dtype, the step fails again
            problem = str(error).partition("\n")[0]
        # What was found out in float64 may be otherwise.
        self.runs.settings = replace(settings, in_double=False)
        self.unseen = unseen
        self.limit = _SINGLE
        self._tell_limit(f"the step does not run in float64 ({problem})")
        return self._first_comparison()

    def _first_comparison(self) -> Comparison:
        reference, unseen = first_reference(self.runs, self.rows, self.limit)
        self.unseen += unseen
        return self._in_parts_beside(reference)

    def _tell_limit(self, reason: str) -> None:
        reason = reason.replace("torch.", "")
        self.unseen.append(
            f"an error below {self.limit:.0e} of a gradient, since {reason}"
        )


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
