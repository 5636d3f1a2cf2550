"""One question: is what the engine computes for some rows what the user's program does?

::

    expected = the user's criterion(module(rows), targets), in plain torch
    actual   = the same by a replica, in parts, weighted as in the step
    if loss or gradients differ by more than rounding: which cause explains that?

With ``whole_batch`` the outputs of the parts are joined, and the criterion is called
once. Everything that the calls change is restored.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from scatterpar.devices.device_ids import physical
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.plan import Plan
from scatterpar.state.reports import moved_between
from scatterpar.step.attempt import Attempt
from scatterpar.step.request import Request
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.threads.process_settings import FULL_FLOAT32
from scatterpar.threads.workers import Overdue
from scatterpar.verify.backward_calls import BackwardCalls
from scatterpar.verify.comparison import Inconclusive, Result
from scatterpar.verify.dropped_warnings import warnings_dropped
from scatterpar.verify.look_losses import Evidence, name_of, weighted_parts
from scatterpar.verify.measurements import attributes_that_calls_move, bytes_per_row
from scatterpar.verify.rounding import formats_inside_operators
from scatterpar.verify.rows import (
    MAX_BYTES,
    MIN_ROWS,
    Part,
    Parts,
    RowChoice,
    in_two,
    parts_of,
)
from scatterpar.verify.runs import RunResult, Runs
from scatterpar.verify.verdicts import (
    RIGHT,
    Verdict,
    error_of_replica,
    gradient_of_no_loss,
    verdict_of,
)

PATIENCE_SECONDS = 40.0  # a look that takes longer is inconclusive
# The workers' limit: the look itself ends in time, unless a call waits.
_WORKERS_PATIENCE = 1.1
_PATIENCE = 4  # with code that fails for a few rows
_MAX_ROWS_OF_BATCH = 256
_MAX_PARTS_OF_STEP = 16  # a look at all of them costs as much as a step


@dataclass(frozen=True)
class Findings:
    """What a look found.

    Attributes:
        verdict: what becomes of the step.
        moved: the names of state that each part moves.
        lost: the shapes of large tensors that user code has written.
        scope: the part of a sub-step that one replica at a time must run.
        difference: the relative difference between the results, which the GPUs' page
            shows, with the ``tolerance`` that it stayed within.
        parts: the rows of each part.
    """

    verdict: Verdict
    moved: Sequence[str] = ()
    lost: Sequence[tuple[int, ...]] = ()
    scope: Scope = Scope.NOTHING
    difference: float = math.inf
    tolerance: float = 0.0
    parts: Parts = ()


def look(
    attempt: Attempt,
    request: Request,
    plan: Plan,
    task: ReplicaTask,
    choice: RowChoice,
    most: int,
) -> Findings:
    """The findings of a replica's look at up to ``most`` rows.

    ``plan`` says how the step, or its loop, would divide the rows of the request.

    Raises:
        Inconclusive: the look could not tell.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    all_runs = [Runs(attempt, request, task, deadline)]
    # First without rounding, which hides differences: autocast is off, and half
    # precision is computed in single precision.
    if task.autocast or all_runs[0].user_code.has_half_precision:
        all_runs.append(Runs(attempt, request, task, deadline, is_as_in_step=True))
    takes_turns = attempt.threads.scope in (Scope.LOSS, Scope.FUNCTION)
    replica_look = ReplicaLook(all_runs, request, plan, task, choice, takes_turns)

    def run() -> Findings:
        # In a copy: what calls set in context variables is gone with it.
        return copy_context().run(replica_look.answer, most)

    device = task.share.device
    workers = attempt.threads.workers
    # A call of one replica alone waits for no other, and runs in the caller's thread.
    is_alone = len(attempt.plan.shares) == 1
    seconds = None if is_alone else _WORKERS_PATIENCE * PATIENCE_SECONDS
    try:
        with warnings_dropped(), _without_tf32(device):
            findings: list[Any] = workers.parallel_apply(
                [run], [()], [device], seconds=seconds
            )
    except Overdue:  # inside a call, which may wait for another replica
        for runs in all_runs:
            runs.user_code.end()
        why = "a call waits for something that does not come"
        raise Inconclusive(why, patience=1, is_final=True) from None
    first: Findings = findings[0]
    return first


def _without_tf32(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """In the body, operators do not round float32 numbers, which hides differences.

    Deep networks enlarge this rounding: right gradients of a DenseNet on a GPU differed
    by 6 %. As with half precision, the tolerance stays that of the step.
    """
    if formats_inside_operators(physical(device)):
        return FULL_FLOAT32
    return contextlib.nullcontext()


@dataclass(eq=False)
class ReplicaLook:
    """Compares what one replica and the user's own module compute for some rows.

    Attributes:
        all_runs: make the runs, under the conditions to try one after the other; user
            code runs inside of their ``isolated`` alone.
        request: the call, with its largest batch.
        plan: how the step, or its loop, would divide the rows.
        task: the replica's task.
        choice: chooses rows.
        takes_turns: whether replicas call functions of the user one at a time.
    """

    all_runs: Sequence[Runs]
    request: Request
    plan: Plan
    task: ReplicaTask
    choice: RowChoice
    takes_turns: bool

    def answer(self, most: int) -> Findings:
        """The findings for chosen rows, or for others if user code fails for them.

        Raises:
            Inconclusive: the look could not tell.
        """
        error: Exception | None = None
        for runs in self.all_runs:
            with runs.user_code.isolated():
                for parts in self._trials(self._affordable(most, runs), runs):
                    try:
                        return self._judge(parts, runs)
                    except Inconclusive:
                        raise
                    # User code may need other rows, a dtype, or memory.
                    except Exception as failure:
                        # Without its frames, which hold rows, outputs, and this object.
                        error = failure.with_traceback(None)
        assert error is not None
        if is_out_of_memory(error):
            raise Inconclusive("memory ran out", patience=2)
        # The step itself may not fail: what fails for several rows may broadcast to
        # one.
        patience = 1 if self.choice.has_single_rows else _PATIENCE
        why = f"{type(error).__name__}: {error}"
        raise Inconclusive(why, patience)

    def _affordable(self, most: int, runs: Runs) -> int:
        """Up to ``most`` rows, whose graph fits into the memory of a sub-step."""
        rows = range(max(self.plan.substep_rows))
        affordable = len(rows)
        if runs.user_code.is_widened:  # single precision takes twice the memory
            affordable //= 2
        affordable = max(MIN_ROWS, affordable)
        if most <= affordable:
            return most
        # Micro-batches are small: because memory is short, or because the batch is.
        is_small = bytes_per_row(runs, rows) * most <= MAX_BYTES
        return most if is_small else affordable

    def _trials(self, most: int, runs: Runs) -> Iterator[Parts]:
        """Yield parts of rows to try until user code computes some.

        ::

            the parts of the step  in the second look, if the batch is small
            the chosen rows
            two equal parts        code may need pairs of rows
            the whole batch        code may need all rows, if they are few and small
            half of the rows, …    memory may have run out
        """
        choice = self.choice
        of_step = parts_of(self.plan)
        has_few_parts = choice.is_as_in_step and self._has_few_parts()
        if has_few_parts and self._is_small_batch(runs):
            yield of_step
        chosen = choice.parts(most)
        yield chosen
        rows = list(chain(*chosen))
        yield in_two(rows)
        if self._is_small_batch(runs):
            yield of_step
        while len(rows) > MIN_ROWS:
            rows = rows[::2]  # rows are sorted by what distinguishes them
            yield choice.divided(rows)

    def _has_few_parts(self) -> bool:
        """Whether the step has several micro-batches, not too many, of one batch."""
        is_one_batch = self.plan.rows == self.request.rows
        return is_one_batch and 1 < len(self.plan.substep_rows) <= _MAX_PARTS_OF_STEP

    def _is_small_batch(self, runs: Runs) -> bool:
        """Whether the whole batch can be computed at once without much memory."""
        num_rows = self.request.rows
        # The cheap question first: the other one computes a sub-step.
        if num_rows > _MAX_ROWS_OF_BATCH:
            return False
        size = bytes_per_row(runs, parts_of(self.plan)[0])
        return size * num_rows < MAX_BYTES

    def _judge(self, chosen: Parts, runs: Runs) -> Findings:
        """Compare the engine's result for these parts of rows with the user's own."""
        rows = list(chain(*chosen))
        parts, weights = weighted_parts(self.request, chosen)
        at_once = self._at_once(rows, runs)
        expected = at_once.total.result
        try:
            run = self._in_parts(parts, weights, runs)
        except Exception as error:
            # A replica that computes the rows at once needs more rows than a part has.
            is_answer = isinstance(error, Inconclusive) or is_out_of_memory(error)
            if is_answer or self._replica_computes(rows, runs):
                raise
            name = name_of(self.request)
            return Findings(error_of_replica(name, len(rows), expected.loss, error))
        _require_gradients(expected, run)
        evidence = Evidence(
            runs.request,
            parts,
            weights,
            expected,
            actual=run.total.result,
            # After the runs, which have shown the formats that they round to.
            tolerance=runs.rounding.tolerance,
            ignored=self.choice.ignored,
            runs=runs,
            draws_steadily=run.random_calls == at_once.random_calls * len(parts),
            moved=self._moved(rows, run, runs),
        )
        return Findings(
            self._verdict(evidence, run),
            moved=evidence.moved,
            lost=runs.user_code.lost(),
            scope=self._scope(run, runs.backward_calls),
            difference=evidence.difference,
            tolerance=evidence.tolerance,
            parts=chosen,
        )

    def _scope(self, run: RunResult, calls: BackwardCalls) -> Scope:
        """The part of a sub-step that one replica at a time must run."""
        if run.shares_state and not self.request.whole_batch:
            return Scope.SUBSTEP if calls.calls_modules else Scope.FUNCTION
        if self.takes_turns and calls.disturbs:
            return Scope.SUBSTEP
        return Scope.NOTHING

    def _moved(self, rows: Part, run: RunResult, runs: Runs) -> list[str]:
        """The names of state that each part moves, or each step's only call."""
        moved = moved_between(run.states)
        # A criterion of all rows has one call, too.
        if self._has_one_substep() or self.request.whole_batch:
            moved += attributes_that_calls_move(runs, rows)
        return list(dict.fromkeys(moved))

    def _has_one_substep(self) -> bool:
        """Whether the replica makes one call per step."""
        return len(self.task.share.micro_batches) == 1

    def _at_once(self, rows: Part, runs: Runs) -> RunResult:
        """The rows at once, by the user's own module and criterion.

        If these draw random numbers, the runs draw constants from now on.
        """
        run = runs.run([rows], runs.own_task)
        runs.user_code.restart()  # which sees whether numbers were drawn
        # Only a run shows whether numbers are drawn.
        if runs.user_code.of_criterion.drawn and not runs.draws_constants:
            runs.draws_constants = True
            run = runs.run([rows], runs.own_task)
        return run

    def _in_parts(
        self, parts: Parts, weights: Sequence[float], runs: Runs
    ) -> RunResult:
        """The results of the replica, as the step is about to compute them."""
        between: Callable[[], None] | None = None
        if self._has_one_substep():  # each part is another replica's
            between = runs.user_code.refresh
        return runs.run(parts, self.task, weights, between=between)

    def _replica_computes(self, rows: Part, runs: Runs) -> bool:
        """Whether the replica computes these rows at once without an error."""
        try:
            runs.at_once(rows, self.task)
        except Exception:
            return False
        return True

    def _verdict(self, evidence: Evidence, run: RunResult) -> Verdict:
        if evidence.difference > evidence.tolerance:
            return verdict_of(evidence)
        # The gradient of a balance loss may be smaller than the tolerance.
        may_add = evidence.runs.rounding.has_functions and len(evidence.parts) > 1
        if may_add and evidence.has_gradient_of_no_loss():
            return gradient_of_no_loss(evidence)
        is_sum = not (self.request.is_mean or self.request.whole_batch)
        if is_sum and run.total.num_with_gradient < len(evidence.parts):
            why = "some parts have no gradient: it may be a mean or a sum"
            raise Inconclusive(why)
        return RIGHT


def _require_gradients(expected: Result, run: RunResult) -> None:
    """Raise ``Inconclusive`` if a result cannot be compared, or says nothing."""
    if not expected.is_finite:
        raise Inconclusive("a gradient is NaN or infinite")
    has_gradient = run.total.num_with_gradient or expected.has_gradient
    if expected.gradients and not has_gradient:
        raise Inconclusive("all gradients are zero")
