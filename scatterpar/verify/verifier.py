"""The engine's looks: when, at which rows, and the errors and warnings that follow.

The only error of a look is its ``ValueError``. If looks stay inconclusive, one warning
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from scatterpar.devices.memory import no_kernel_search
from scatterpar.errors import warn
from scatterpar.log import logger
from scatterpar.replicas.references import module_of
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import is_cross_entropy
from scatterpar.step.request import Request
from scatterpar.step.task import ReplicaTask
from scatterpar.tables import shown
from scatterpar.verify.causes import RETURN, Action, in_lines
from scatterpar.verify.evidence import name_of
from scatterpar.verify.joins import Compute, JoinCheck
from scatterpar.verify.look import Findings, look
from scatterpar.verify.ranges import informative_tensors, ranges_of
from scatterpar.verify.rows import RowChoice, ignored_values
from scatterpar.verify.runs import MAX_ELEMENTS, Inconclusive
from scatterpar.verify.schedule import Kind, Kinds

_MIN_ROWS = 9  # of a look, unless a row needs much memory
_SUBSTEPS_OF_FIRST_LOOK = 2  # as many rows as so many micro-batches have
_SHARE_OF_LATER_LOOKS = 4  # of the rows of a micro-batch
_SHARE_OF_LARGE_MODELS = 8  # of the rows of the batch, because each row takes long
_MAX_BYTES = 2**22  # of inputs in a look
_MAX_ENTRIES = 128  # of ``Rows``, whose sizes are read in each step
_LOOK_AS_IN_STEP = 1  # the second look: in the first one chosen rows tell more
_KEY_LENGTH = 60  # beginnings of warnings that are not repeated
_REASON_LENGTH = 120


class Verifier:
    """Looks at steps, and remembers results by kind of criterion and batch."""

    def __init__(self, is_distributed: bool) -> None:
        self._is_distributed = is_distributed
        self._kinds = Kinds()
        self._joins = JoinCheck()
        self._warned: set[str] = set()  # beginnings of warnings, and names of state

    def check(
        self, attempt: Attempt, tasks: Sequence[ReplicaTask], remedies: str = ""
    ) -> None:
        """Before the sub-steps: look at some rows, if that is due.

        With ``remedies`` refusals and warnings name these, and not the engine's
        arguments.

        Raises:
            ValueError: a replica, in parts, gives another loss or gradient than the
                user's own module and criterion for the same rows.
        """
        with attempt.span("verify"), no_kernel_search():  # a look has other sizes
            with_criterion = tasks[: len(attempt.replicas.criteria)]
            self._check(attempt, with_criterion, remedies)

    def _check(
        self, attempt: Attempt, tasks: Sequence[ReplicaTask], remedies: str
    ) -> None:
        request = attempt.request.of_largest_batch()
        is_divided = self._is_distributed or len(attempt.plan.substep_rows) > 1
        if request.whole_batch and request.rows == 1:
            is_divided = False
        question = Question(attempt, request, tasks, is_divided)
        flags = attempt.replicas.of_model.flags
        kind, details = self._kinds.kind_of(request, question.batch, is_divided, flags)
        if kind.is_due(question.ranges, details):
            try:
                self._ask(question, kind, remedies)
            finally:
                # After a refusal the same rows again: fewer may not show it.
                kind.looks += not kind.is_refused
                _drop_gradients(attempt)  # user code may compute some
        attempt.threads.is_serial |= kind.is_serial

    def _ask(self, question: Question, kind: Kind, remedies: str) -> None:
        """Look at a step. Refuses it, or tells what the look has found."""
        try:
            findings = question.findings(kind.looks)
        except Inconclusive as error:
            logger.debug("%s is inconclusive: %s", question.title(kind.looks), error)
            self._note_inconclusive(question, kind, error, remedies)
            return
        verdict = findings.verdict
        title = question.title(kind.looks)
        logger.debug("%s: %s", title, verdict.action.value)
        if verdict.action is Action.REFUSE:
            kind.is_refused = True
            if verdict.problem and remedies:
                raise ValueError(f"{verdict.problem}\n{remedies} Nothing was changed.")
            raise ValueError(verdict.text) from verdict.error
        kind.is_serial |= findings.shares_state and question.is_shared
        if kind.is_serial:
            self._warn_once(question.text_of_serial())
        self._tell_state(question, findings)
        if verdict.action is Action.WARN:
            self._warn_once(verdict.text)
        kind.note_agreement(question.ranges)

    def _note_inconclusive(
        self, question: Question, kind: Kind, error: Inconclusive, remedies: str
    ) -> None:
        kind.num_inconclusive += 1
        kind.is_given_up = error.is_final
        is_told = kind.is_given_up or not question.counts_as_torch
        if is_told and kind.num_inconclusive >= error.patience:
            self._warn_once(question.text_of_unchecked(error, remedies))

    def _tell_state(self, question: Question, findings: Findings) -> None:
        """Warn of state that sub-steps move, and of large tensors that code writes."""
        moved = [name for name in findings.moved if name not in self._warned]
        if moved:
            self._warned.update(moved)
            self._warn_once(question.text_of_moved(moved))
        if findings.lost:
            self._warn_once(_text_of_lost(findings.lost[0]))

    def _warn_once(self, text: str) -> None:
        if text[:_KEY_LENGTH] not in self._warned:
            warn(text)
            self._warned.add(text[:_KEY_LENGTH])

    def check_join(
        self,
        attempt: Attempt,
        task: ReplicaTask,
        outputs: Sequence[Sequence[Any]],
        compute: Compute,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Check on a few rows how ``outputs`` are joined, until values show the order.

        ``compute`` gave the outputs; ``function`` is what the user passed to
        ``engine.map``.

        Raises:
            ValueError: the outputs of parts, joined, are not the output of one call.
        """
        request = attempt.request.of_largest_batch()
        self._joins.check(attempt, request, task, outputs, compute, function)


def fits(attempt: Attempt, task: ReplicaTask) -> bool | None:
    """Whether losses combine as the request says, for a few rows of its only batch.

    The replica of ``task`` computes the rows, and all state is restored. Returns
    ``None`` if the look is inconclusive.
    """
    question = Question(attempt, attempt.request, [task], is_divided=True)
    try:
        findings = question.findings(looks=1)
    except Exception:  # inconclusive, or raised by user code
        return None
    return findings.verdict.action is not Action.REFUSE


class Question:
    """A step that may be looked at: its ranges, rows and texts.

    Attributes:
        request: that of the largest batch.
        batch: that batch.
        is_divided: whether the step divides the batch into parts.
        is_shared: whether several replicas call one criterion.
        counts_as_torch: the criterion is torch's own cross entropy, of which labels do
            not matter, since the engine counts as it does.
        ranges: those of labels, masks, lengths.
    """

    def __init__(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        is_divided: bool,
    ) -> None:
        self._attempt = attempt
        self._tasks = tasks
        self.request = request
        self.batch = request.batches[0]
        self.is_divided = is_divided
        self.is_shared = len(tasks) > 1 and not request.whole_batch
        kind = type(module_of(request.criterion))
        is_of_torch = kind in (nn.CrossEntropyLoss, nn.NLLLoss, type(None))
        is_counted = is_of_torch and is_cross_entropy(request.criterion)
        self.counts_as_torch = is_counted and not request.count
        self.ranges: Sequence[Tensor] = ()
        if not self.counts_as_torch:
            self.ranges = ranges_of(informative_tensors(request, _MAX_ENTRIES))

    def findings(self, looks: int) -> Findings:
        """What the look number ``looks`` finds.

        Raises:
            Inconclusive: the look could not tell.
        """
        choice = RowChoice(
            informative_tensors(self.request),
            self.request.rows,
            self._ignored(),
            variant=looks,
            is_divided=self.is_divided,
            has_single_rows=max(self._attempt.plan.substep_rows) == 1,
            is_as_in_step=looks == _LOOK_AS_IN_STEP,
        )
        most = self._most_rows(is_first=not looks)
        return look(self._attempt, self.request, self._tasks, choice, most)

    def _ignored(self) -> list[int]:
        """Labels that the loss may ignore."""
        criterion = self.request.criterion
        own_loss = self._attempt.replicas.of_model.root.forward
        function = own_loss if criterion is None else criterion
        return ignored_values(function, self.request.count)

    def _most_rows(self, is_first: bool) -> int:
        """As many rows as are cheap: fewer of a large model, and in later looks."""
        rows_of_substep = max(self._attempt.plan.substep_rows)
        most = rows_of_substep // _SHARE_OF_LATER_LOOKS
        if is_first:
            most = rows_of_substep * _SUBSTEPS_OF_FIRST_LOOK
        parameters = self._attempt.replicas.of_model.root.parameters()
        if sum(parameter.numel() for parameter in parameters) > MAX_ELEMENTS:
            share_of_batch = self.request.rows // _SHARE_OF_LARGE_MODELS
            most = min(most, rows_of_substep, share_of_batch)
        tensors = self.batch.without_targets().tensors()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        affordable = _MAX_BYTES * self.request.rows // (size + 1)
        return min(max(_MIN_ROWS, most), max(2, affordable))

    @property
    def _name(self) -> str:
        return name_of(self.request.criterion)

    def title(self, looks: int) -> str:
        """The look after so many ``looks``, as the log names it."""
        return f"look {looks + 1} at {self._name}, {self.request.rows} rows"

    def text_of_serial(self) -> str:
        """The warning for a criterion that reads what forward passes leave behind."""
        return in_lines(
            f"{self._name} reads what forward passes leave behind (a hook?), which "
            "replicas share, so they run one after the other, which is slower.",
            f"To run them together, {RETURN}.",
            "Or pass verify=False.",
        )

    def text_of_moved(self, names: Sequence[str]) -> str:
        """The warning for state that sub-steps move."""
        sub_steps = len(self._attempt.plan.substep_rows)
        how = f"at each of the {sub_steps} sub-steps, and on each replica apart"
        if sub_steps == 1:
            how = "on the replica alone, so the next step begins with your value"
        return in_lines(
            f"forward passes move {shown(', '.join(names))}: {how}.",
            "Move it once per step, outside of forward, or keep it in a buffer and "
            "train with one sub-step.",
            "docs/limits.md, State in modules.",
        )

    def text_of_unchecked(self, error: Exception, remedies: str = "") -> str:
        """The warning for inconclusive looks, with the assumption and what to pass.

        With ``remedies`` these, and not the engine's arguments.
        """
        request = self.request
        why = shown_reason(error)
        if request.whole_batch:
            return in_lines(
                f"could not check {self._name} with whole_batch=True: {why}.",
                "To check it, call engine.check(inputs, targets, criterion, "
                "whole_batch=True) once, with a batch that fits on one device.",
                "verify=False does not check.",
            )
        assumed = "a sum"
        ways = [
            "count= for a mean over something else, such as scatterpar.count_labels()"
        ]
        if request.count is not None:
            ways = ["another count= if the loss averages over something else"]
        if request.is_mean:
            terms = "rows" if request.count is None else "what count= gives"
            assumed = f"a mean over {terms}"
            ways.append('reduction="sum" for a sum')
        if remedies:
            return in_lines(
                f"could not check how {self._name} combines micro-batches: {why}.",
                f"The engine assumes {assumed}. {remedies}",
            )
        ways.append("whole_batch=True if it compares rows")
        return in_lines(
            f"could not check how {self._name} combines micro-batches: {why}.",
            f"The engine assumes {assumed}. Pass {', '.join(ways)}.",
            "engine.check(inputs, targets, criterion) compares all gradients of a "
            "batch that fits on one device. verify=False does not check.",
        )


def shown_reason(error: Exception) -> str:
    """The first line of an error, shortened."""
    lines = str(error).strip().splitlines()
    return lines[0][:_REASON_LENGTH].rstrip(".") if lines else type(error).__name__


def _text_of_lost(shape: tuple[int, ...]) -> str:
    return in_lines(
        f"your code writes a tensor of shape {shape}, above 64 MiB, which a look at a "
        "few rows did not save.",
        "Keep it in a buffer of the module, or pass verify=False.",
    )


def _drop_gradients(attempt: Attempt) -> None:
    """Drop gradients of user code, in replicas and in the user's leaves."""
    for replica_set in attempt.replicas.replica_sets:
        replica_set.clear_gradients()
    for leaf in attempt.user_leaves:
        leaf.grad = None
