"""A user's step, model and batch: run on any split of the batch's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.markers import count_rows
from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.causes.counts import counts_of, named_tensors
from scatterpar.causes.vectors import is_close
from scatterpar.splitting import parts as row_parts
from scatterpar.splitting.gradients import (
    Gradients,
    is_zero,
    largest_error,
    zeros_of_all,
)
from scatterpar.splitting.operator_modes import Numbers
from scatterpar.splitting.parts import Part, Split
from scatterpar.splitting.process_state import ProcessState
from scatterpar.splitting.ranks import RankJob, run_on_ranks
from scatterpar.splitting.step_run import (
    Settings,
    StepFunction,
    StepResult,
    run_step,
)
from scatterpar.splitting.trained import as_double

Loss = Callable[[Any, Any], Tensor]

# The largest relative difference that rounding explains: in float64, and by the dtype
# to which the step casts or in which all is computed.
_EXACT = 1e-6
_CAST = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SINGLE = 1e-3
_VANISHED = 1e-3  # of the limit: a gradient below it is rounding
_LARGEST_LIMIT = max(_CAST.values())


class Trial:
    """Runs a step on any split. Nothing stays changed in this process.

    Attributes:
        rows: the numbers of all rows, in the order in which they are cut.
        counts: what a loss may divide by, for each row.
        settings: how the step is run; found out by ``first_reference``.
        limit: the largest relative difference that rounding explains.
        term: the term of the loss whose gradients are compared; empty for all.
        unseen: sentences about what the comparison cannot show.
        probes: numbers and texts that ``step`` has set on itself, in its last run.
    """

    def __init__(
        self,
        step: StepFunction,
        model: nn.Module,
        batch: Any,
        *,
        parts: int,
        ranks: int,
        equal: bool | None,
        loss: Loss | None,
        seconds: float,
        counted: Any = None,
        returns_values: bool = False,
    ) -> None:
        self.step = step
        self.model = model
        self.parts = parts
        self.ranks = ranks
        self.has_loss = loss is not None
        self.settings = Settings(returns_values=returns_values)
        self.limit = _EXACT
        self.term = ""
        self.unseen: list[str] = []
        self._attributes = set(getattr(step, "__dict__", ()))
        self.probes: dict[str, Any] = {}
        self._zeros: Gradients = {}  # for each gradient, once all names are known
        self._reference_step = step if loss is None else _PlainStep(loss)
        self._equal = equal
        self._seconds = seconds
        num_rows = count_rows({"batch": batch}, 0, refuse_grad=False)
        least = ranks * parts if equal else 2 * ranks * parts
        if num_rows < least:
            raise ValueError(
                f"batch has {num_rows} rows, too few for {ranks * parts} parts; pass "
                f"at least {least} rows"
            )
        self._batch = batch_of(batch, None, num_rows, 0)
        tensors = named_tensors(batch if counted is None else counted)
        self.counts = counts_of(tensors, num_rows)
        self.has_sequences = any(_is_sequence(named.tensor) for named in tensors)
        # The sizes of parts and ranks do not depend on the order of rows.
        self.rows = list(range(num_rows))
        self._groups = self._sizes_of_groups()
        self.rows = row_parts.order_rows(tensors, self.counts, self._groups)
        self._state = ProcessState(model, (step, loss))

    # --- cutting ---

    def split(self) -> Split:
        """All rows, for the numbers of ranks and parts that the user has given."""
        return self.cut(self.rows, self.ranks, self.parts, self._equal)

    def cut(
        self, rows: Sequence[int], ranks: int, parts: int, equal: bool | None
    ) -> Split:
        """Rows in parts: equally many for ranks, unless ``equal`` says otherwise."""
        shares = row_parts.cut(rows, ranks, equal=equal is not False)
        return [row_parts.cut(share, parts, equal=equal is True) for share in shares]

    def _sizes_of_groups(self) -> list[list[int]]:
        """The numbers of rows of all parts, and of all ranks."""
        split = self.split()
        parts = [len(part) for share in split for part in share]
        ranks = [sum(map(len, share)) for share in split]
        return [parts] if len(parts) == len(ranks) else [parts, ranks]

    def hidden_terms(self) -> list[str]:
        """Sentences about counts that this batch cannot show."""
        if self.has_sequences and all(count.is_constant for count in self.counts):
            return [
                "whether labels are counted right, since all rows have equally many; "
                "give some rows labels of -100"
            ]
        hidden = row_parts.hidden_counts(self.counts, self.rows, self._groups)
        sentences = []
        for path in dict.fromkeys(count.path for count in hidden):
            words = [count.words for count in hidden if count.path == path]
            sentences.append(
                f"whether {words[0]} are counted right in {path}, since all parts have "
                f"equally many per row"
            )
        return sentences

    # --- running ---

    def compare(self) -> tuple[StepResult, list[StepResult]]:
        """The results of the whole batch, and of the batch in parts.

        Finds out the settings, and the limit.

        Raises ``ValueError`` if the step leaves no gradient, or is for one batch.
        """
        try:
            reference = self.first_reference()
            results = self.results(self.split())
            self._align([reference, *results])
        except TimeoutError:
            raise
        except Exception as error:
            if self._takes_one_batch():
                raise ValueError(
                    "step was written for one batch, and gets a list of them; write "
                    "`for batch in batches:` around its forward and backward pass"
                ) from error
            raise
        if not self.settings.in_double:
            return reference, results
        errors = [
            largest_error(result.gradients, reference.gradients)[0]
            for result in results
        ]
        if max(errors) <= self.limit:
            return reference, results
        coarsest = self._coarsest_cast()
        if coarsest is None:
            return reference, results
        settings = self.settings
        self.settings = replace(settings, casts_in_double=True)
        try:
            coarsest = self._coarsest_cast()
            sharper = self.reference(self.rows), self.results(self.split())
        except TimeoutError:
            raise
        except Exception:  # something insists on a lower dtype
            self.settings = settings
        else:
            reference, results = sharper
        if coarsest is not None:
            self.limit = _CAST.get(coarsest, _LARGEST_LIMIT)
            self._tell_limit(f"the step computes in {coarsest}")
        return reference, results

    def _align(self, results: Sequence[StepResult]) -> None:
        """Give all results the same gradients: zeros for one that they lack."""
        if not self._zeros:
            self._zeros = zeros_of_all([result.gradients for result in results])
        for result in results:
            gradients = result.gradients
            result.gradients = {
                name: gradients.get(name, zero) for name, zero in self._zeros.items()
            }

    def _tell_limit(self, reason: str) -> None:
        reason = f"an error below {self.limit:.0e} of a gradient, since {reason}"
        self.unseen.append(reason.removeprefix("torch."))

    def _takes_one_batch(self) -> bool:
        """Whether the step runs for a batch in the place of a list of batches."""
        try:
            (result, *_) = self._run(_StepOfOneBatch(self.step), [[self.rows]])
        except Exception:
            return False
        return not is_zero(result.gradients)

    def first_reference(self) -> StepResult:
        """The gradient of the whole batch. Finds out how random numbers are replaced.

        Raises ``ValueError`` if the step leaves no gradient.
        """
        try:
            result = self.reference(self.rows)
        except TimeoutError:
            raise
        except Exception as error:  # a dtype in the user's code? If not, it fails again
            self.settings = replace(self.settings, in_double=False)
            self.limit = max(_SINGLE, self._limit_of_model())
            result = self.reference(self.rows)
            problem = str(error).partition("\n")[0]
            self._tell_limit(f"the step does not run in float64 ({problem})")
        if is_zero(result.gradients) and not self.settings.returns_values:
            raise ValueError(
                "step left no gradient on a parameter of the model; call backward() "
                "for the model that step gets, and do not end with zero_grad()"
            )
        if "torch" in result.drawn:
            result = self._with_steady_numbers(result)
        return result

    def _with_steady_numbers(self, as_drawn: StepResult) -> StepResult:
        """The result with random numbers that do not depend on the split.

        The first kind of numbers with which no gradient vanishes is taken. Constant
        weights of a classifier, for one, leave no gradient on what is below it.
        """
        results: list[tuple[list[str], StepResult, Settings]] = []
        for numbers in (Numbers.CONSTANT, Numbers.BY_COLUMN, Numbers.BY_ENTRY):
            self.settings = replace(self.settings, numbers=numbers)
            if numbers is Numbers.BY_ENTRY:
                # Draws that a batch of fewer rows has as well.
                fewer = self.reference(self.rows[: len(self.rows) // 2])
                shapes = results[-1][1].shapes & fewer.shapes
                self.settings = replace(self.settings, fixed_shapes=shapes)
            result = self.reference(self.rows)
            vanished = self._vanished(result.gradients, as_drawn.gradients)
            results.append((vanished, result, self.settings))
            if not vanished:
                break
        vanished, result, self.settings = min(results, key=_num_vanished)
        if len(vanished) == len(as_drawn.gradients) or is_zero(result.gradients):
            raise ValueError(
                "the gradient is zero with the constant numbers that random operators "
                "give in splitcheck, so nothing can be compared; draw what step draws "
                "before, and pass it in batch"
            )
        if vanished:
            self.unseen.append(
                f"the gradient of {', '.join(vanished[:3])}, which is zero with "
                f"constant random numbers"
            )
        return result

    def _vanished(self, gradients: Gradients, as_drawn: Gradients) -> list[str]:
        """The parameters whose gradient is not finite, or rounding beside another."""
        vanished = []
        for name, gradient in as_drawn.items():
            size = float(gradients[name].norm()) if name in gradients else 0.0
            is_rounding = size <= _VANISHED * self.limit * float(gradient.norm())
            if (is_rounding and gradient.any()) or not math.isfinite(size):
                vanished.append(name)
        return vanished

    def _limit_of_model(self) -> float:
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        return max(_CAST.get(dtype, 0.0) for dtype in dtypes)

    def _coarsest_cast(self) -> torch.dtype | None:
        """The coarsest dtype below float64 to which the step casts."""
        settings = self.settings
        self.settings = replace(settings, watch_dtypes=True)
        try:
            return self.reference(self.rows).coarsest
        finally:
            self.settings = settings

    def reference(self, rows: Part) -> StepResult:
        """The result for rows as one part of one rank, or of ``loss=``."""
        return self._run(self._reference_step, [[rows]])[0]

    def results(self, split: Split) -> list[StepResult]:
        """The results of a split, rank by rank."""
        return self._run(self.step, split)

    def _run(self, step: StepFunction, split: Split) -> list[StepResult]:
        """Results with the gradients of ``term`` alone, if there is one."""
        results = self._run_once(step, split)
        if not self.term:
            return results
        settings = self.settings
        self.settings = replace(settings, without_term=self.term)
        try:
            results_without = self._run_once(step, split)
        finally:
            self.settings = settings
        for result, without in zip(results, results_without, strict=True):
            for name, gradient in without.gradients.items():
                result.gradients[name] = result.gradients[name] - gradient
        return results

    def first_meeting(self) -> str:
        """The first module whose outputs for some rows depend on the other rows.

        Empty if there is none.
        """
        settings = self.settings
        self.settings = replace(settings, watch_modules=True)
        first_part = self.split()[0][0]
        try:
            of_all = self.reference(self.rows).outputs
            of_part = self.reference(first_part).outputs
        finally:
            self.settings = settings
        for (name, expected), (name_in_part, actual) in zip(
            of_all, of_part, strict=False
        ):
            if name != name_in_part:
                break
            has_rows = len(expected) * len(first_part) == len(actual) * len(self.rows)
            if not has_rows or expected.shape[1:] != actual.shape[1:]:
                continue
            if not is_close(actual, expected[: len(actual)], self.limit):
                return name
        return ""

    def _run_once(self, step: StepFunction, split: Split) -> list[StepResult]:
        shares = []
        for share in split:
            shares.append([self._select(part) for part in share])
        try:
            if self.ranks > 1:
                job = RankJob(step, self.model, shares, self.settings)
                results = run_on_ranks(job, self._seconds)
            else:
                tensors = self._state.tensors
                with self._state.restored():
                    result = run_step(
                        step, self.model, shares[0], self.settings, tensors
                    )
                    self._note_probes()
                results = [result]
        except Exception as error:
            error.add_note(f"splitcheck called step with {described(split)} rows")
            raise
        if self._zeros:
            self._align(results)
        return results

    def _note_probes(self) -> None:
        """Note numbers that ``step`` has set on itself: they are there to be read."""
        for name, value in getattr(self.step, "__dict__", {}).items():
            if name not in self._attributes and type(value) in PLAIN_CLASSES:
                self.probes[name] = value

    def _select(self, part: Part) -> Any:
        batch, _ = self._batch.select(part).unwrapped(copy=True)
        if self.settings.in_double:
            batch = nested.map_tensors(as_double, batch)
        return batch


@dataclass(frozen=True)
class _PlainStep:
    """A step of plain torch, for one batch. No closure, so that it can be pickled."""

    loss: Loss

    def __call__(self, model: nn.Module, batches: list[Any]) -> Tensor:
        (batch,) = batches
        value = self.loss(model, batch)
        value.backward()
        return value


@dataclass(frozen=True)
class _StepOfOneBatch:
    """A step that gets the only batch, not a list of batches."""

    step: StepFunction

    def __call__(self, model: nn.Module, batches: list[Any]) -> Any:
        (batch,) = batches
        return self.step(model, batch)


def _num_vanished(result: tuple[list[str], StepResult, Settings]) -> int:
    return len(result[0])


def described(split: Split) -> str:
    """The sizes of parts, such as ``6 + 4 | 6 + 4`` for two ranks."""
    shares = []
    for share in split:
        shares.append(" + ".join(str(len(part)) for part in share))
    return " | ".join(shares)


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and not tensor.is_floating_point()
