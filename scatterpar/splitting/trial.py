"""A user's step, model and batch: run on any split of the batch's rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.markers import count_rows
from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.causes.counts import Count, NamedTensor, counts_of, named_tensors
from scatterpar.causes.vectors import is_close
from scatterpar.splitting import row_parts
from scatterpar.splitting.check_report import Cause
from scatterpar.splitting.gradients import (
    EXACT,
    Gradients,
    as_double,
    is_zero,
    largest_error,
    listed,
    relative_errors,
    union,
    zeros_of_all,
)
from scatterpar.splitting.operator_modes import Numbers, Shape
from scatterpar.splitting.process_state import ProcessState
from scatterpar.splitting.rank_processes import RankJob, run_on_ranks
from scatterpar.splitting.row_parts import Part, Split
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.step_run import (
    Settings,
    StepFunction,
    StepResult,
    run_step,
)
from scatterpar.splitting.trained_leaves import OneBatch

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
    """Runs a step on any split. Nothing stays changed in this process.

    Attributes:
        arguments: what the user asks.
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
        step, loss = arguments.step, arguments.loss
        self._attributes: dict[str, Any] = {}  # of a function, after its last run
        self._zeros: Gradients = {}  # for each gradient, once all names are known
        self._reference_step = step if loss is None else OneBatch(loss, is_loss=True)
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
        self._batch = batch_of(batch, None, num_rows, 0)
        # The sizes of parts and ranks do not depend on the order of rows.
        self.rows = list(range(num_rows))
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
        self._state = ProcessState(self.model, (step, loss))

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
            if isinstance(error, TimeoutError) or not self._takes_one_batch():
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
        if not self._zeros:
            # A leaf may get a gradient in parts, and none in the whole batch.
            everything = [reference, *results]
            self._zeros = zeros_of_all([result.gradients for result in everything])
            if not self._zeros:
                raise ValueError(
                    "all gradients have other shapes in parts than in the whole batch, "
                    "as FSDP's flat parameters have on ranks; use fully_shard, whose "
                    "shards are put together"
                )
            self._align(everything)
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

    def _align(self, results: Sequence[StepResult]) -> None:
        """Give all results the same gradients: zeros for one that they lack."""
        if not self._zeros:  # some names are not known yet
            return
        for result in results:
            gradients = result.gradients
            result.uncompared += tuple(sorted(gradients.keys() - self._zeros.keys()))
            result.gradients = {
                name: gradients.get(name, zero) for name, zero in self._zeros.items()
            }

    def _takes_one_batch(self) -> bool:
        """Whether the step runs for a batch in the place of a list of batches."""
        try:
            # Run, not read: a loop may name its batches as it likes.
            step = OneBatch(self.arguments.step)
            (result, *_) = self._run(step, [[self.rows]], self.settings)
        except Exception:
            return False
        return not is_zero(result.gradients)

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

    def leave_numbers(self) -> None:
        """Set on ``step`` again the numbers that its last run in this process has set.

        A test reads ``step.largest`` after the check. It is the one thing that stays.
        """
        # On ranks there are none: a process takes its own along.
        for name, value in self._attributes.items():
            if type(value) in PLAIN_CLASSES:
                setattr(self.arguments.step, name, value)

    # --- running ---

    def reference(self, rows: Part, **settings: Any) -> StepResult:
        """The result for rows as one part of one rank, or of ``loss=``.

        The same rows in the same way give the same result, so it is computed once: on
        ranks each run starts processes. ``settings`` are others than the present ones.
        """
        changed = replace(self.settings, **settings)
        # Settings are part of the key: the cells of a grid may need different ones.
        key = (self.ranks > 1, tuple(rows), changed)
        references = self.arguments.references
        if key not in references:
            references[key] = self._run(self._reference_step, [[rows]], changed)[0]
        # A copy, because gradients of a result are written: aligned, or subtracted.
        result = replace(references[key])
        self._align([result])
        return result

    def results(self, split: Split) -> list[StepResult]:
        """The results of a split, rank by rank."""
        return self._run(self.arguments.step, split, self.settings)

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

    def _run(
        self, step: StepFunction, split: Split, settings: Settings
    ) -> list[StepResult]:
        """Results with the gradients of one term alone, if the settings name one."""
        results = self._run_once(step, split, replace(settings, term=""))
        if settings.term:
            without = self._run_once(step, split, settings)
            # Gradients are linear in the terms, so the rest can be subtracted.
            for result, others in zip(results, without, strict=True):
                for name, gradient in others.gradients.items():
                    result.gradients[name] = result.gradients[name] - gradient
        return results

    def _run_once(
        self, step: StepFunction, split: Split, settings: Settings
    ) -> list[StepResult]:
        shares = [[self._select(part) for part in share] for share in split]
        model = self.model
        try:
            if self.ranks > 1:
                job = RankJob(step, model, shares, settings)
                results = run_on_ranks(job, self.arguments.timeout)
            else:
                tensors = self._state.tensors
                with self._state.restored():
                    results = [run_step(step, model, shares[0], settings, tensors)]
                    if isinstance(self.arguments.step, FunctionType):
                        self._attributes = dict(vars(self.arguments.step))
        except Exception as error:
            # The user has not cut the batch: the sizes say in which split it failed.
            error.add_note(f"splitcheck called step with {described(split)} rows")
            raise
        self._align(results)
        return results

    def _select(self, part: Part) -> Any:
        batch, _ = self._batch.select(part).unwrapped(copy=True)
        # Integers stay: they are ids and labels.
        if self.settings.in_double:
            batch = nested.map_tensors(as_double, batch)
        return batch


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


def described(split: Split) -> str:
    """The sizes of parts, such as ``6 + 4 | 6 + 4`` for two ranks."""
    shares = []
    for share in split:
        shares.append(" + ".join(str(len(part)) for part in share))
    return " | ".join(shares)
