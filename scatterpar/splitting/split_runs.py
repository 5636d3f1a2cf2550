"""Runs of a user's step on any split of a batch, in this process or on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.spans import Part
from scatterpar.splitting.gradients import Gradients, as_double, is_zero
from scatterpar.splitting.process_state import ProcessState
from scatterpar.splitting.rank_processes import RankJob, run_on_ranks
from scatterpar.splitting.row_parts import Split
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.step_run import (
    Settings,
    StepFunction,
    StepResult,
    run_step,
)
from scatterpar.splitting.trained_leaves import OneBatch


class SplitRuns:
    """Runs a step on any split. Nothing stays changed in this process.

    Attributes:
        settings: how the step is run from now on.
        zeros: for each gradient, once the names of all are known: then all results have
            the same gradients.
    """

    def __init__(self, arguments: SplitArguments, num_rows: int) -> None:
        self.settings = Settings()
        self.zeros: Gradients = {}
        self._arguments = arguments
        loss = arguments.loss
        self._reference_step = arguments.step
        if loss is not None:
            self._reference_step = OneBatch(loss, is_loss=True)
        self._batch = batch_of(arguments.batch, None, num_rows, 0)
        self._state = ProcessState(arguments.model, (arguments.step, loss))
        self._attributes: dict[str, Any] = {}  # of a function, after its last run

    def reference(self, rows: Part, **changes: Any) -> StepResult:
        """The result for rows as one part of one rank, or of ``loss=``.

        ``changes`` are other settings, for this run alone. The same rows in the same
        way give the same result, so it is computed once: on ranks each run starts
        processes.
        """
        settings = replace(self.settings, **changes)
        # Settings are part of the key: the cells of a grid may need different ones.
        key = (self._arguments.ranks > 1, tuple(rows), settings)
        references = self._arguments.references
        if key not in references:
            references[key] = self._run(self._reference_step, [[rows]], settings)[0]
        # A copy, because gradients of a result are written: aligned, or subtracted.
        result = replace(references[key])
        self.align([result])
        return result

    def results(self, split: Split) -> list[StepResult]:
        """The results of a split, rank by rank."""
        return self._run(self._arguments.step, split, self.settings)

    def gradients_of(self, split: Split) -> Gradients:
        """The gradients of a split on rank 0."""
        return self.results(split)[0].gradients

    def takes_one_batch(self, rows: Part) -> bool:
        """Whether the step runs for a batch in the place of a list of batches."""
        try:
            # Run, not read: a loop may name its batches as it likes.
            step = OneBatch(self._arguments.step)
            (result, *_) = self._run(step, [[rows]], self.settings)
        except Exception:
            return False
        return not is_zero(result.gradients)

    def align(self, results: Sequence[StepResult]) -> None:
        """Give all results the same gradients: zeros for one that they lack."""
        if not self.zeros:  # some names are not known yet
            return
        for result in results:
            gradients = result.gradients
            result.uncompared += tuple(sorted(gradients.keys() - self.zeros.keys()))
            result.gradients = {
                name: gradients.get(name, zero) for name, zero in self.zeros.items()
            }

    def leave_numbers(self) -> None:
        """Set on ``step`` again the numbers that its last run in this process has set.

        A test reads ``step.largest`` after the check. It is the one thing that stays.
        """
        # On ranks there are none: a process takes its own along.
        for name, value in self._attributes.items():
            if type(value) in PLAIN_CLASSES:
                setattr(self._arguments.step, name, value)

    def _run(
        self, step: StepFunction, split: Split, settings: Settings
    ) -> list[StepResult]:
        in_double = settings.in_double
        shares = [[self._select(part, in_double) for part in share] for share in split]
        model = self._arguments.model
        try:
            if self._arguments.ranks > 1:
                job = RankJob(step, model, shares, settings)
                results = run_on_ranks(job, self._arguments.timeout)
            else:
                tensors = self._state.tensors
                with self._state.restored():
                    results = [run_step(step, model, shares[0], settings, tensors)]
                    if isinstance(self._arguments.step, FunctionType):
                        self._attributes = dict(vars(self._arguments.step))
        except Exception as error:
            # The user has not cut the batch: the sizes say in which split it failed.
            error.add_note(f"splitcheck called step with {sizes_in_words(split)} rows")
            raise
        self.align(results)
        return results

    def _select(self, part: Part, in_double: bool) -> Any:
        batch, _ = self._batch.select(part).unwrapped(copy=True)
        # Integers stay: they are ids and labels.
        if in_double:
            batch = nested.map_tensors(as_double, batch)
        return batch


def sizes_in_words(split: Split) -> str:
    """The sizes of parts, such as ``6 + 4 | 6 + 4`` for two ranks."""
    shares = []
    for share in split:
        shares.append(" + ".join(str(len(part)) for part in share))
    return " | ".join(shares)
