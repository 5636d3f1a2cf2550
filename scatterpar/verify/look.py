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
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.virtual_devices import physical
from scatterpar.errors import defect
from scatterpar.log import logger
from scatterpar.numerics.comparison import Inconclusive, OnlyRounding, SaysNothing
from scatterpar.numerics.rounding import formats_inside_operators
from scatterpar.numerics.wider_precision import Precision
from scatterpar.replicas.module_contents import root_to_replicate
from scatterpar.spans import Part
from scatterpar.step.attempt import Attempt
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.threads.process_settings import FULL_FLOAT32
from scatterpar.threads.workers import Overdue
from scatterpar.verify.choice import weighted_parts
from scatterpar.verify.dropped_messages import warnings_dropped
from scatterpar.verify.look_causes import has_gradient_of_no_loss
from scatterpar.verify.look_results import LookResults, name_of_loss
from scatterpar.verify.measurements import (
    attributes_that_calls_move,
    bytes_per_row,
    state_that_begins,
)
from scatterpar.verify.moved_state import moved_between
from scatterpar.verify.results import Result
from scatterpar.verify.row_broadcasts import broadcast_of_rows
from scatterpar.verify.rows import (
    MAX_BYTES,
    MIN_ROWS,
    Parts,
    RowChoice,
    affordable_rows,
    in_two,
)
from scatterpar.verify.runs import RunResult, Runs
from scatterpar.verify.verdicts import (
    RIGHT,
    Action,
    CallEffects,
    LookReport,
    Verdict,
    error_of_replica,
    gradient_of_no_loss,
    pairs_of_rows,
    rows_broadcast,
    taken_for_rows,
    verdict_of,
)

PATIENCE_SECONDS = 40.0  # a look that takes longer is inconclusive
# The workers' limit: the look itself ends in time, unless a call waits.
_WORKERS_PATIENCE = 1.1
_MAX_ROWS_OF_BATCH = 256
_FEW_ROWS = 8  # whatever they are, calls read state
_OF_MISTAKES = (AttributeError, LookupError, NameError, TypeError, AssertionError)
_VERIFY = Path(__file__).parent
_MAX_PARTS_OF_STEP = 64  # a look at all of them costs as much as a step

# Parts of rows, and the report on them, or the reason why there is none.
Answer = tuple[Parts, LookReport | Inconclusive]


def look(
    attempt: Attempt,
    task: ReplicaTask,
    choice: RowChoice,
) -> LookReport:
    """Look with a replica at the rows that ``choice`` chooses.

    Raises:
        Inconclusive: the look could not tell.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS

    def look_in(precision: Precision) -> ReplicaLook:
        runs = Runs(
            attempt,
            choice.request,
            task,
            deadline,
            precision=precision,
            rows_of_substeps=choice.rows_of_substeps,
        )
        return ReplicaLook(runs, choice)

    # First without rounding, which hides differences: autocast is off, and half
    # precision is computed in single precision.
    looks = [look_in(Precision.SINGLE)]
    if task.autocast or looks[0].runs.user_code.has_half_precision:
        looks.append(look_in(Precision.AS_IN_STEP))
    in_double = look_in(Precision.DOUBLE)

    def run() -> LookReport:
        # In a copy: what calls set in context variables is gone with it.
        return copy_context().run(first_report, looks, in_double)

    device = task.share.device
    workers = attempt.threads.workers
    # A call of one replica alone waits for no other, and runs in the caller's thread.
    is_alone = len(attempt.plan.shares) == 1
    seconds = None if is_alone else _WORKERS_PATIENCE * PATIENCE_SECONDS
    try:
        with warnings_dropped(), _without_tf32(device):
            reports: list[Any] = workers.parallel_apply(
                [run], [()], [device], seconds=seconds
            )
    except Overdue:  # inside a call, which may wait for another replica
        for replica_look in (*looks, in_double):
            replica_look.runs.user_code.end()
        why = "a call waits for something that does not come"
        raise Inconclusive(why, patience=1, is_final=True) from None
    report: LookReport = reports[0]
    return report


def _without_tf32(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """In the body, operators do not round float32 numbers, which hides differences.

    Deep networks enlarge this rounding: right gradients of a DenseNet on a GPU differed
    by 6 %. As with half precision, the tolerance stays that of the step.
    """
    if formats_inside_operators(physical(device)):
        return FULL_FLOAT32
    return contextlib.nullcontext()


def first_report(looks: Sequence[ReplicaLook], in_double: ReplicaLook) -> LookReport:
    """The report on chosen rows, or on others if user code fails for them. Unless that
    refuses the step, also on the step's own parts, if the batch is small.

    What rounding may explain is asked again of ``in_double``, before a refusal, and
    before a yes that rests on rows alone: where gradients of rows, or of choices within
    a row, nearly cancel, their rounding is no longer small. ``look_rounding`` has the
    order of all who are asked.

    Raises:
        Inconclusive: the look could not tell.
    """
    answers = _first_answers(looks)
    may_be_rounding = any(map(_may_be_rounding, answers))
    if may_be_rounding and in_double.runs.user_code.is_widened:
        try:
            with in_double.runs.user_code.isolated():
                answers = [in_double.asked_again(answer) for answer in answers]
                if len(answers) == 1:  # of one that float64 does not refuse
                    answers += in_double.answers_for_step(answers[0])
        except Exception as error:
            _tell_mistake(error)
            logger.debug("the first answer stands, since in float64: %s", error)
    return _joint_report(answers)


def _joint_report(answers: Sequence[Answer]) -> LookReport:
    """The report on all parts that were compared: what speaks against a step counts
    more than what speaks for it.

    Raises:
        Inconclusive: there is no report; the first reason.
    """
    reports = [found for _, found in answers if isinstance(found, LookReport)]
    if not reports:
        reason = answers[0][1]
        assert isinstance(reason, Inconclusive)
        raise reason
    return functools.reduce(LookReport.beside, reports)


def _may_be_rounding(answer: Answer) -> bool:
    _, found = answer
    if isinstance(found, LookReport):
        return found.verdict.may_be_rounding
    return isinstance(found, OnlyRounding)


def _first_answers(looks: Sequence[ReplicaLook]) -> Sequence[Answer]:
    """The first answers of one of the looks.

    Raises:
        Inconclusive: user code fails for all rows that were tried.
    """
    error: Exception | None = None
    for replica_look in looks:
        with replica_look.runs.user_code.isolated():
            for parts in replica_look.trials():
                try:
                    first = replica_look.answer_for(parts)
                # User code may need other rows, a dtype, or memory.
                except Exception as failure:
                    _tell_mistake(failure)
                    # Without its frames, which hold rows, outputs, and this object.
                    error = failure.with_traceback(None)
                    continue
                return [first, *replica_look.answers_for_step(first)]
            # All failed: these rows are other numbers than a micro-batch has.
            verdict = replica_look.verdict_of_broadcast()
            if verdict is not None:
                return [((), LookReport(verdict))]
    assert error is not None
    if is_out_of_memory(error):
        raise Inconclusive("memory ran out", patience=2)
    # The step itself may not fail, and be wrong.
    raise Inconclusive(f"{type(error).__name__}: {error}", patience=1)


def _tell_mistake(error: Exception) -> None:
    """Tell of an error of a line of ``verify/``, not of the user's code that it calls.

    Warns; raises ``Defect`` in the tests of this package.
    """
    if not isinstance(error, _OF_MISTAKES):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Not of the whole package: its other folders refuse values of the user's by such
    # errors.
    if Path(frames[-1].f_code.co_filename).parent == _VERIFY:
        defect(f"in a look: {error!r}")


@dataclass(eq=False)
class ReplicaLook:
    """Compares what one replica and the user's own module compute for some rows.

    Attributes:
        runs: makes the runs, under conditions of its own; user code runs inside of its
            ``isolated`` alone.
        choice: chooses rows.
    """

    runs: Runs
    choice: RowChoice

    def trials(self) -> Iterator[Parts]:
        """Yield parts of rows to try until user code computes some.

        ::

            the chosen rows
            two equal parts        code may need pairs of rows
            the whole batch        code may need all rows, if they are few and small
            half of the rows, …    memory may have run out
        """
        choice = self.choice
        chosen = choice.parts(self._affordable())
        yield chosen
        rows = list(chain(*chosen))
        two_parts = in_two(rows)
        yield two_parts if choice.is_divided else [list(chain(*two_parts))]
        if self._is_small_batch:
            yield choice.of_step()
        while len(rows) > MIN_ROWS:
            rows = rows[::2]  # rows are sorted by what distinguishes them
            yield choice.divided(rows)

    @cached_property
    def _bytes_per_row(self) -> float:
        """The memory that the graph of a row keeps, measured by a sub-step."""
        return bytes_per_row(self.runs, range(max(self.choice.plan.substep_rows)))

    @property
    def _is_small_batch(self) -> bool:
        """Whether the whole batch can be computed at once without much memory."""
        request = self.choice.request
        if request.rows > _MAX_ROWS_OF_BATCH:
            return False
        # Asked before the graph is measured, which computes a sub-step with a copy of
        # its rows.
        tensors = [tensor for batch in request.batches for tensor in batch.tensors()]
        if affordable_rows(tensors, request.rows) < request.rows:
            return False
        return self._bytes_per_row * request.rows < MAX_BYTES

    @property
    def _is_cheap_step(self) -> bool:
        """Whether a look may compute all that the step does."""
        choice = self.choice
        # Several batches have one plan, and a look at the largest one.
        is_one_batch = choice.plan.rows == choice.request.rows
        num_parts = len(choice.plan.substep_rows)
        is_cheap = is_one_batch and num_parts <= _MAX_PARTS_OF_STEP
        return is_cheap and self._is_small_batch

    def _affordable(self) -> int:
        """The number of rows whose graph is small, or fits as that of a sub-step."""
        affordable = max(self.choice.plan.substep_rows)
        if self.runs.user_code.is_widened:  # a wider format takes twice the memory
            affordable //= 2
        affordable = max(MIN_ROWS, affordable)
        # Micro-batches are small: because memory is short, or because the batch is.
        if affordable < self.choice.most:
            small = MAX_BYTES / max(1.0, self._bytes_per_row)
            affordable = max(affordable, int(small))
        return affordable

    def report_for(self, chosen: Parts) -> LookReport:
        """Compare the engine's result for these parts of rows with the user's own."""
        runs = self.runs
        request = runs.request
        rows = list(chain(*chosen))
        parts, weights = weighted_parts(request, chosen)
        at_once = self._at_once(rows)
        # With one call per step each part is another replica's.
        prepare = runs.user_code.reset_replicas if self._has_one_call else None
        try:
            in_parts = runs.run(parts, weights=weights, prepare=prepare)
        except Exception as error:
            loss = at_once.result.loss
            return LookReport(self._verdict_of_failure(error, rows, loss))
        if runs.taken_for_rows is not None:
            return LookReport(taken_for_rows(runs.taken_for_rows, request.dim))
        _require_gradients(at_once.result, in_parts)
        moved = self._moved(in_parts, rows)
        # After the runs, which have shown the formats that they round to.
        tolerance = runs.rounding.tolerance
        draws_steadily = in_parts.random_calls == at_once.random_calls * len(parts)
        results = LookResults(
            request,
            parts,
            weights,
            at_once.result,
            in_parts.result,
            tolerance,
            runs,
            self.choice.ignored,
            draws_steadily,
            moved,
        )
        verdict = _judged(results, in_parts)
        # Last, because the runs that find a cause may show more.
        lost = runs.user_code.lost()
        scope = self._scope(in_parts)
        effects = CallEffects(moved, lost, scope)
        return LookReport(
            verdict,
            effects,
            [chosen],
            results.difference,
            tolerance,
            runs.rounding.coarsest_eps,
            runs.sizes_without_rows,
        )

    def answer_for(self, parts: Parts) -> Answer:
        """The report on these parts, or the reason why there is none."""
        try:
            return parts, self.report_for(parts)
        # Without its frames: one of these holds this look.
        except Inconclusive as reason:
            return parts, reason.with_traceback(None)

    def asked_again(self, answer: Answer) -> Answer:
        """The answer of this look if rounding may explain that of an earlier one."""
        if not _may_be_rounding(answer):
            return answer
        parts, _ = answer
        try:
            again = self.answer_for(parts)
        except Exception as error:
            _tell_mistake(error)
            # User code may need the step's formats, time or memory.
            logger.debug("the first answer stands, since in float64: %s", error)
            return answer
        _, found = again
        is_answer = isinstance(found, (LookReport, OnlyRounding))
        return again if is_answer else answer

    def answers_for_step(self, first: Answer) -> Sequence[Answer]:
        """The answer for the step's own parts, if the batch is small, beside the first
        one.

        Other parts may agree by chance: each has a term, or two unequal rows, where a
        micro-batch of the step has none.
        """
        parts, found = first
        of_step = self.choice.of_step()
        is_step = [*map(list, parts)] == [*map(list, of_step)]
        if isinstance(found, LookReport):
            is_open = found.verdict.action is not Action.REFUSE
        else:
            is_open = isinstance(found, SaysNothing)
        if is_step or not is_open or not self._is_cheap_step:
            return []
        if self.runs.user_code.is_late():
            return []
        try:
            return [self.answer_for(of_step)]
        except Exception as error:  # user code may need more rows than a part has
            _tell_mistake(error)
            return []

    def verdict_of_broadcast(self) -> Verdict | None:
        """The verdict if rows of a micro-batch broadcast, and those of two do not:
        plain torch refuses the batch.
        """
        runs = self.runs
        request = runs.request
        if request.criterion is None or request.whole_batch:
            return None
        parts = self.choice.of_step()
        # With several sizes of micro-batches the step itself fails.
        if len(parts) < 2 or len({len(rows) for rows in parts}) > 1:
            return None
        # Two micro-batches of one row may broadcast to two columns.
        micro_batches = parts[:3] if self.choice.has_single_rows else parts[:2]
        try:
            broadcast = broadcast_of_rows(runs, micro_batches)
        except Exception as error:  # the module fails, or its outputs do not join
            _tell_mistake(error)
            return None
        if broadcast is None:
            return None
        return rows_broadcast(name_of_loss(request), broadcast)

    @property
    def _has_one_call(self) -> bool:
        """Whether the step calls each replica once."""
        return len(self.runs.replica_task.share.micro_batches) == 1

    def _verdict_of_failure(
        self, error: Exception, rows: Part, loss_at_once: float
    ) -> Verdict:
        """The verdict if the replica fails with parts of ``rows``.

        Raises the error if it says nothing of the step.
        """
        runs = self.runs
        if isinstance(error, Inconclusive) or is_out_of_memory(error):
            raise error
        if runs.pairs_of_rows is not None:
            return pairs_of_rows(runs.pairs_of_rows)
        try:
            runs.at_once(rows)
        except Exception:
            name = name_of_loss(runs.request)
            return error_of_replica(name, len(rows), loss_at_once, error)
        # It computes the rows at once: it needs more rows than a part has.
        raise error

    def _measured(
        self, measure: Callable[[Runs, Part], list[str]], rows: Part
    ) -> list[str]:
        """Run a measurement; empty if user code fails in it."""
        try:
            return measure(self.runs, rows)
        except Exception as error:
            # With other weights, or another seed: the step has neither.
            _tell_mistake(error)
            return []

    def _at_once(self, rows: Part) -> RunResult:
        """Compute the rows in one piece, by the user's own module and criterion.

        If these draw random numbers, the runs draw constants from now on.
        """
        runs = self.runs
        run = runs.run([rows], runs.own_task)
        runs.user_code.restart()  # which sees whether numbers were drawn
        # Only a run shows whether numbers are drawn.
        if runs.user_code.has_drawn and not runs.draws_constants:
            runs.draws_constants = True
            run = runs.run([rows], runs.own_task)
        return run

    def _moved(self, run: RunResult, rows: Part) -> list[str]:
        """The names of state that calls have moved, each once."""
        moved = [*self._moved_by(run, rows)]
        if not self.choice.number:
            # The next steps begin without it, too.
            moved += self._measured(state_that_begins, rows[:_FEW_ROWS])
        return list(dict.fromkeys(moved))

    def _moved_by(self, run: RunResult, rows: Part) -> list[str]:
        """Find what state the calls of a run in parts have moved. Returns its names."""
        runs = self.runs
        moved = moved_between(run.states)
        # A criterion of all rows has one call, too.
        if self._has_one_call or runs.request.whole_batch:
            moved += attributes_that_calls_move(runs, rows)
        return moved

    def _scope(self, run: RunResult) -> Scope:
        """The part of a sub-step that one replica at a time must run."""
        calls = self.runs.backward_calls
        request = self.runs.request
        # Of a function that replicas share, one replica's forward pass may change what
        # it reads.
        is_shared = root_to_replicate(request.criterion) is None
        if run.shares_state and is_shared and not request.whole_batch:
            return Scope.SUBSTEP if calls.calls_modules else Scope.FUNCTION
        return Scope.NOTHING


def _require_gradients(expected: Result, run: RunResult) -> None:
    """Raise ``Inconclusive`` if a result cannot be compared, or says nothing."""
    if not expected.is_finite:
        # A loss that diverges passes through, as in torch: it is told if it stays.
        raise SaysNothing("a gradient is NaN or infinite")
    has_gradient = run.num_with_gradient or expected.has_gradient
    # Of a module without trained parameters losses are compared alone.
    is_loss_zero = not (expected.gradients or expected.loss or run.result.loss)
    if is_loss_zero or (expected.gradients and not has_gradient):
        raise SaysNothing("all gradients are zero")


def _judged(results: LookResults, run: RunResult) -> Verdict:
    """Returns whether loss and gradient in parts are those in one piece.

    Raises ``Inconclusive`` if these rows cannot tell.
    """
    if not results.is_within_tolerance:
        if results.runs.pairs_of_rows is not None:
            return pairs_of_rows(results.runs.pairs_of_rows)
        return verdict_of(results)
    # The gradient of a balance loss may be smaller than the tolerance.
    may_add = results.runs.rounding.has_functions and len(results.parts) > 1
    finding = has_gradient_of_no_loss(results) if may_add else None
    if finding is not None:
        return gradient_of_no_loss(results, finding)
    request = results.request
    is_sum = not (request.is_mean or request.whole_batch)
    # Without trained parameters losses are compared alone.
    compares_gradients = bool(run.result.gradients)
    num_with_terms = run.num_with_gradient if compares_gradients else run.num_with_loss
    # A mean has terms in one part alone, or the sum of two would not fit.
    if is_sum and num_with_terms < min(2, len(results.parts)):
        what = "gradient" if compares_gradients else "loss"
        why = f"a single part has a {what}: it may be a mean or a sum"
        raise SaysNothing(why)
    return RIGHT
