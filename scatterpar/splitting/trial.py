"""A user's step, model and batch: run on any split of the batch's rows."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.markers import count_rows
from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.causes.counts import counts_of, named_tensors
from scatterpar.causes.vectors import is_close
from scatterpar.splitting import row_parts
from scatterpar.splitting.check_report import Cause
from scatterpar.splitting.gradients import (
    EXACT,
    Gradients,
    as_double,
    invisible,
    is_zero,
    largest_error,
    listed,
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
from scatterpar.splitting.trained_leaves import PlainStep

# The largest relative difference that rounding explains, by the coarsest dtype, and if
# not all is computed in float64.
_CAST = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SINGLE = 1e-3
_ROUNDING = 1e-9  # all that float64 leaves
_VANISHED = 1e-3  # of the limit: a gradient below it is rounding
_LARGEST_LIMIT = max(_CAST.values())


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
        self.unseen: list[str] = []
        step, loss = arguments.step, arguments.loss
        self._attributes: dict[str, Any] = {}  # of a function, after its last run
        self._zeros: Gradients = {}  # for each gradient, once all names are known
        self._reference_step = step if loss is None else PlainStep(loss)
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
        counted = batch if arguments.counted is None else arguments.counted
        # A loss may count in the samples of a data set, which a collator makes tensors.
        tensors = named_tensors(counted)
        self.counts = counts_of(tensors, num_rows)
        self.has_sequences = any(_is_sequence(tensor) for _, tensor in tensors)
        # The sizes of parts and ranks do not depend on the order of rows.
        self.rows = list(range(num_rows))
        sizes = [[len(part) for part in share] for share in self.split()]
        # The numbers of rows of all parts, and of all ranks, if there are several.
        groups = [list(chain.from_iterable(sizes)), [sum(share) for share in sizes]]
        self._groups = [group for group in groups if len(group) > 1]
        self._orders = row_parts.orders_of_rows(tensors, self.counts, self._groups)
        self._state = ProcessState(self.model, (step, loss))
        self.rows = self._orders[0]

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

    def worst_error(
        self, results: Sequence[StepResult], expected: Gradients
    ) -> tuple[float, str]:
        """The largest relative error of all ranks, and where it is."""
        return max(self._error(result.gradients, expected) for result in results)

    def differ(self, actual: Gradients, expected: Gradients) -> bool:
        """Whether more than rounding differs."""
        return self._error(actual, expected)[0] > self.limit

    def _error(self, actual: Gradients, expected: Gradients) -> tuple[float, str]:
        are_values = self.settings.returns_values
        return largest_error(actual, expected, self.limit, are_values=are_values)

    def compare(self) -> tuple[StepResult, list[StepResult]]:
        """The results of the whole batch, and of the batch in parts.

        Finds out the settings, and the limit.

        Raises ``ValueError`` if the step leaves no gradient, or is for one batch.
        """
        try:
            reference, results = self._most_exact_results()
        except Exception as error:
            # A list has no shape: the error is of any kind, but no timeout, after which
            # a second try would wait as long.
            if isinstance(error, TimeoutError) or not self._takes_one_batch():
                raise
            raise ValueError(
                "step was written for one batch, and gets a list of them; write `for "
                "batch in batches:` around its forward and backward pass"
            ) from error
        worst, _ = self.worst_error(results, reference.gradients)
        coarsest = reference.coarsest or results[0].coarsest
        if coarsest is not None and worst > self.limit:
            self.limit = max(self.limit, _CAST.get(coarsest, _LARGEST_LIMIT))
            self._tell_limit(f"the step computes in {coarsest}")
        is_exact = self.settings.in_double and coarsest is None
        if is_exact and _ROUNDING < worst <= self.limit:
            self.unseen.append(
                f"whether a difference of {worst:.0e}, which is more than rounding, "
                f"grows in a trained model; pass one"
            )
        for rows in self._orders[1:]:
            if worst <= self.limit:
                self.rows = rows
                results = self.results(self.split())
        return reference, results

    def _most_exact_results(self) -> tuple[StepResult, list[StepResult]]:
        """The results in float64; in the user's dtypes if a kernel insists on one."""
        settings = self.settings
        try:
            return self._results()
        except TimeoutError:
            raise
        except Exception as error:  # if it is no dtype, the step fails again
            problem = str(error).partition("\n")[0]
        # What was found out in float64 may be otherwise.
        self.settings = replace(settings, in_double=False)
        self.unseen.clear()
        self.limit = _SINGLE
        self._tell_limit(f"the step does not run in float64 ({problem})")
        return self._results()

    def _results(self) -> tuple[StepResult, list[StepResult]]:
        reference = self.first_reference()
        results = self.results(self.split())
        self._align([reference, *results])
        return reference, results

    def _align(self, results: Sequence[StepResult]) -> None:
        """Give all results the same gradients: zeros for one that they lack."""
        if not self._zeros:
            # A leaf may get a gradient in parts, and none in the whole batch.
            self._zeros = zeros_of_all([result.gradients for result in results])
            if not self._zeros:
                raise ValueError(
                    "all gradients have other shapes in parts than in the whole batch, "
                    "as FSDP's flat parameters have on ranks; use fully_shard, whose "
                    "shards are put together"
                )
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
            step = _StepOfOneBatch(self.arguments.step)
            (result, *_) = self._run(step, [[self.rows]])
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
            with self.changed(numbers=Numbers.AS_DRAWN):
                as_drawn = self.reference(self.rows)
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
            actual = result.gradients.get(name)
            size = 0.0 if actual is None else float(actual.norm())
            # Norms, because a gradient may be moved among the entries by other numbers.
            is_rounding = size <= _VANISHED * self.limit * float(gradient.norm())
            if (is_rounding and gradient.any()) or not math.isfinite(size):
                vanished.append(name)
        return vanished

    # --- what the comparison cannot show ---

    def note(self, results: Sequence[StepResult]) -> str:
        """Sentences about what ``results``, that of the whole batch first, hide."""
        sentences = [*self._hidden_terms(), *self.unseen]
        uncompared = union(result.uncompared for result in results)
        if uncompared:
            sentences.append(
                f"the gradient of {', '.join(uncompared)}: not compared, because no "
                f"optimizer in step has it, or its shape depends on the split"
            )
        if not self.arguments.returns_values:
            # Frozen ones have no gradient in any loop.
            trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
            hidden = invisible(results[0].gradients, self.limit)
            names = [name for name in hidden if name in trained]
            if names:
                sentences.append(
                    f"the gradient of {listed(names)}, which is zero beside others"
                )
        return "; ".join(sentences)

    def _hidden_terms(self) -> list[str]:
        """Sentences about counts that this batch cannot show."""
        if self.has_sequences and all(count.is_constant for count in self.counts):
            return [
                "whether labels are counted right, since all rows have equally many; "
                "give some rows labels of -100"
            ]
        sentences: dict[str, str] = {}  # by the tensor: its first count is the usual
        for count in row_parts.hidden_counts(self.counts, self._orders, self._groups):
            # A sum has the path of its tensor in its words.
            place = "" if count.is_sum else f" in {count.path}"
            sentences.setdefault(
                count.path,
                f"whether {count.words} are counted right{place}, since all parts have "
                f"equally many per row, or some part has none",
            )
        return list(sentences.values())

    def _tell_limit(self, reason: str) -> None:
        reason = reason.replace("torch.", "")
        self.unseen.append(
            f"an error below {self.limit:.0e} of a gradient, since {reason}"
        )

    # --- running ---

    @contextlib.contextmanager
    def changed(self, **settings: Any) -> Iterator[None]:
        """In the body, other settings hold."""
        saved = self.settings
        self.settings = replace(saved, **settings)
        try:
            yield
        finally:
            self.settings = saved

    def reference(self, rows: Part) -> StepResult:
        """The result for rows as one part of one rank, or of ``loss=``.

        The same rows in the same way give the same result, so it is computed once: on
        ranks each run starts processes.
        """
        key = (self.ranks > 1, tuple(rows), self.settings)
        references = self.arguments.references
        # Settings are part of the key: the cells of a grid may need different ones.
        if key not in references:
            references[key] = self._run(self._reference_step, [[rows]])[0]
        # A copy, because gradients of a result are written: aligned, or subtracted.
        result = replace(references[key])
        result.gradients = dict(result.gradients)
        if self._zeros:
            self._align([result])
        return result

    def run_again(self) -> tuple[StepResult, list[StepResult], bool]:
        """The results of the whole batch and of all parts, with the present settings.

        Returns also whether only rounding differs.
        """
        reference = self.reference(self.rows)
        results = self.results(self.split())
        worst, _ = self.worst_error(results, reference.gradients)
        return reference, results, worst <= self.limit

    def results(self, split: Split) -> list[StepResult]:
        """The results of a split, rank by rank."""
        return self._run(self.arguments.step, split)

    def gradients_of(self, split: Split) -> Gradients:
        """The gradients of a split on rank 0."""
        return self.results(split)[0].gradients

    def report(
        self, results: Sequence[StepResult], worst: float, cause: Cause
    ) -> dict[str, Any]:
        """The attributes of ``SplitReport``. ``results`` are as in ``note``."""
        return {
            "rows": len(self.rows),
            "sizes": described(self.split()),
            "ranks": self.ranks,
            "worst": worst,
            "limit": self.limit,
            "cause": cause.name,
            "why": cause.why,
            "remedy": cause.remedy,
            "note": self.note(results),
        }

    def _run(self, step: StepFunction, split: Split) -> list[StepResult]:
        """Results with the gradients of one term alone, if the settings name one."""
        without = self._run_once(step, split)
        if not self.settings.term:
            return without
        # Gradients are linear in the terms, so the rest can be subtracted.
        with self.changed(term=""):
            results = self._run_once(step, split)
        for result, others in zip(results, without, strict=True):
            for name, gradient in others.gradients.items():
                result.gradients[name] = result.gradients[name] - gradient
        return results

    def first_meeting(self) -> str:
        """The first module whose outputs for some rows depend on the other rows.

        Empty if there is none.
        """
        first_part = self.split()[0][0]
        with self.changed(watch_modules=True):
            of_all = self.reference(self.rows).outputs
            of_part = self.reference(first_part).outputs
        size = len(first_part)
        for name, expected in of_all.items():
            # The first entries are of the first rows, also of several views: each view
            # behind the other, or row by row.
            of_first_rows = expected[:size]
            actual = of_part.get(name, expected)[:size]
            if actual.shape != of_first_rows.shape:  # of no rows
                continue
            if not is_close(actual, of_first_rows, self.limit):
                return name
        return ""

    def _run_once(self, step: StepFunction, split: Split) -> list[StepResult]:
        shares = []
        for share in split:
            shares.append([self._select(part) for part in share])
        model = self.model
        settings = self.settings
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
        if self._zeros:
            self._align(results)
        return results

    def leave_numbers(self) -> None:
        """Set on ``step`` again the numbers that its last run in this process has set.

        A test reads ``step.largest`` after the check. It is the one thing that stays.
        """
        # On ranks there are none: a process takes its own along.
        for name, value in self._attributes.items():
            if type(value) in PLAIN_CLASSES:
                setattr(self.arguments.step, name, value)

    def _select(self, part: Part) -> Any:
        batch, _ = self._batch.select(part).unwrapped(copy=True)
        # Integers stay: they are ids and labels.
        if self.settings.in_double:
            batch = nested.map_tensors(as_double, batch)
        return batch


@dataclass(frozen=True)
class _StepOfOneBatch:
    """A step that gets the only batch, not a list of batches."""

    step: StepFunction

    def __call__(self, model: nn.Module, batches: list[Any]) -> Any:
        (batch,) = batches
        return self.step(model, batch)


def described(split: Split) -> str:
    """The sizes of parts, such as ``6 + 4 | 6 + 4`` for two ranks."""
    shares = []
    for share in split:
        shares.append(" + ".join(str(len(part)) for part in share))
    return " | ".join(shares)


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and not tensor.is_floating_point()
