"""A user's step, model and batch: run on any split of the batch's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.markers import count_rows
from scatterpar.causes.counts import counts_of, named_tensors
from scatterpar.splitting import parts as row_parts
from scatterpar.splitting.gradients import is_usable, is_zero
from scatterpar.splitting.parts import Part, Split
from scatterpar.splitting.process_state import ProcessState
from scatterpar.splitting.ranks import RankJob, run_on_ranks
from scatterpar.splitting.step_run import (
    Numbers,
    Settings,
    StepFunction,
    StepResult,
    as_double,
    run_step,
)

Loss = Callable[[Any, Any], Tensor]

# The largest relative difference that rounding explains: in float64, and by the dtype
# to which the step casts or in which all is computed.
_EXACT = 1e-6
_CAST = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SINGLE = 1e-3
_LARGEST_LIMIT = max(_CAST.values())


class Trial:
    """Runs a step on any split. Nothing stays changed in this process.

    Attributes:
        rows: the numbers of all rows, in the order in which they are cut.
        counts: what a loss may divide by, for each row.
        settings: how the step is run; found out by ``first_reference``.
        limit: the largest relative difference that rounding explains.
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
    ) -> None:
        self.step = step
        self.model = model
        self.parts = parts
        self.ranks = ranks
        self.has_loss = loss is not None
        self.settings = Settings()
        self.limit = _EXACT
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
        tensors = named_tensors(batch)
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

    def first_reference(self) -> StepResult:
        """The gradient of the whole batch. Finds out the settings.

        Raises ``ValueError`` if the step leaves no gradient.
        """
        try:
            result = self.reference(self.rows)
        except TimeoutError:
            raise
        except Exception:  # a dtype in the user's code? If not, it fails again
            self.settings = replace(self.settings, in_double=False)
            self.limit = max(_SINGLE, self._limit_of_model())
            result = self.reference(self.rows)
        if "torch" in result.drawn:
            for numbers in (Numbers.CONSTANT, Numbers.BY_COLUMN):
                self.settings = replace(self.settings, numbers=numbers)
                result = self.reference(self.rows)
                if is_usable(result.gradients):
                    break
        if is_zero(result.gradients):
            raise ValueError(
                "step left no gradient on a parameter of the model; call backward() "
                "for the model that step gets, and do not end with zero_grad()"
            )
        return result

    def _limit_of_model(self) -> float:
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        return max(_CAST.get(dtype, 0.0) for dtype in dtypes)

    def allow_casts(self, worst: float) -> None:
        """Raise the limit for a ``worst`` difference that a cast explains."""
        if not self.limit < worst <= _LARGEST_LIMIT or not self.settings.in_double:
            return
        settings = self.settings
        self.settings = replace(settings, watch_dtypes=True)
        try:
            coarsest = self.reference(self.rows).coarsest
        finally:
            self.settings = settings
        if coarsest is not None:
            self.limit = _CAST.get(coarsest, _LARGEST_LIMIT)

    def reference(self, rows: Part) -> StepResult:
        """The result for rows as one part of one rank, or of ``loss=``."""
        return self._run(self._reference_step, [[rows]])[0]

    def results(self, split: Split) -> list[StepResult]:
        """The results of a split, rank by rank."""
        return self._run(self.step, split)

    def _run(self, step: StepFunction, split: Split) -> list[StepResult]:
        shares = []
        for share in split:
            shares.append([self._select(part) for part in share])
        try:
            if self.ranks > 1:
                job = RankJob(step, self.model, shares, self.settings)
                return run_on_ranks(job, self._seconds)
            tensors = self._state.tensors
            with self._state.restored():
                return [run_step(step, self.model, shares[0], self.settings, tensors)]
        except Exception as error:
            error.add_note(f"splitcheck called step with {described(split)} rows")
            raise

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


def described(split: Split) -> str:
    """The sizes of parts, such as ``6 + 4 | 6 + 4`` for two ranks."""
    shares = []
    for share in split:
        shares.append(" + ".join(str(len(part)) for part in share))
    return " | ".join(shares)


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and not tensor.is_floating_point()
