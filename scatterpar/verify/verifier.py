"""The engine's looks: when, at which rows, and the errors and warnings that follow.

The only error of a look is its ``ValueError``. If looks stay inconclusive, one warning
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scatterpar.batch.batch import batches_of
from scatterpar.devices.memory import no_kernel_search
from scatterpar.errors import warn
from scatterpar.log import logger
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.plan import Plan, make_plan
from scatterpar.step.attempt import Attempt
from scatterpar.step.loop_options import LoopOptions
from scatterpar.step.request import LossCandidate, Request
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.tables import shown
from scatterpar.threads.process_settings import SETTINGS_KEPT
from scatterpar.verify.choice import alike
from scatterpar.verify.compared_leaves import MAX_ELEMENTS
from scatterpar.verify.look import look
from scatterpar.verify.look_losses import name_of
from scatterpar.verify.ranges import (
    counts_as_torch,
    informative_tensors,
    ranges_of_step,
)
from scatterpar.verify.rows import (
    RowChoice,
    affordable_rows,
    ignored_values,
    parts_of,
)
from scatterpar.verify.schedule import Kind, Kinds, Stage
from scatterpar.verify.verdicts import RETURN, Action, Verdict, in_lines

_MIN_ROWS = 9  # of a look, unless a row needs much memory
_SUBSTEPS_OF_FIRST_LOOK = 2  # as many rows as so many micro-batches have
_SHARE_OF_LATER_LOOKS = 4  # of the rows of a micro-batch
_SHARE_OF_LARGE_MODELS = 8  # of the rows of the batch, because each row takes long
_KEY_LENGTH = 60  # beginnings of warnings that are not repeated

_WAYS = (
    "Pass count= for a mean over something else, such as scatterpar.count_labels(), "
    'reduction="sum" for a sum, or whole_batch=True if it compares rows. '
    "engine.check(inputs, targets, criterion) compares all gradients of a batch that "
    "fits on one device. verify=False does not check."
)


_TEXT_OF_SEED = in_lines(
    "forward passes seed the random generator themselves, so each micro-batch draws "
    "the numbers of the first one.",
    "Draw the numbers before the step, and pass them among the inputs, with one entry "
    "per row; or seed outside of forward.",
)


@dataclass(frozen=True)
class Choice:
    """What looks say of a step.

    Attributes:
        candidate: the way by which losses combine; ``None`` if the arguments of the
            step say how.
        scope: the part of a sub-step that a turn has to include.
    """

    candidate: LossCandidate | None = None
    scope: Scope = Scope.NOTHING


# A candidate, and why the look at it is inconclusive.
_Unclear = tuple[LossCandidate, Inconclusive]


class Verifier:
    """Looks at steps, and remembers results by kind of criterion and batch.

    Warnings wait until the step has succeeded: one that fails says its error alone.

    Attributes:
        kinds: the kinds of steps, and the looks at each.
    """

    def __init__(self, is_distributed: bool = False) -> None:
        self._is_distributed = is_distributed
        self.kinds = Kinds()
        # The words of a loop's candidates, which makes new ones in each step.
        self._not_refuted: list[str] = []
        # The texts, and the names of state in them.
        self._waiting: list[tuple[str, Sequence[str]]] = []
        # Beginnings of the warnings so far, and the names in them.
        self._told: set[str] = set()

    def remaining(self, candidates: Sequence[LossCandidate]) -> Sequence[LossCandidate]:
        """Those of a loop's candidates that looks leave; the first one is assumed."""
        by_words = {candidate.words: candidate for candidate in candidates}
        # A look may have moved another candidate to the front.
        known = [by_words[words] for words in self._not_refuted if words in by_words]
        # None is known before the first look, and in a loop with other candidates.
        return known or candidates

    def check(
        self, attempt: Attempt, tasks: Sequence[ReplicaTask], loop: LoopOptions
    ) -> Choice:
        """Before the sub-steps: look at some rows, if that is due.

        Returns by which candidate of the loop losses combine, which may be another one
        than the request assumes.

        Raises:
            ValueError: a replica, in parts, gives another loss or gradient than the
                user's own module and criterion for the same rows.
        """
        self._waiting.clear()  # of a step that has failed
        with attempt.span("verify"):
            return self._check(attempt, tasks[0], loop)

    def warn(self, text: str, names: Sequence[str] = ()) -> None:
        """Warn once, when the step has succeeded, of state with these ``names``."""
        self._waiting.append((text, names))

    def tell(self) -> None:
        """The step has succeeded: warn of what the look has found."""
        for text, names in self._waiting:
            # By their beginnings, because numbers at the end differ from step to step.
            if text[:_KEY_LENGTH] not in self._told:
                self._told.update([text[:_KEY_LENGTH], *names])
                warn(text)
        self._waiting.clear()

    def _check(self, attempt: Attempt, task: ReplicaTask, loop: LoopOptions) -> Choice:
        request = attempt.request.of_largest_batch()
        is_divided = self._is_distributed or len(attempt.plan.substep_rows) > 1
        # The criterion gets the one row, whatever the number of replicas.
        if request.whole_batch and request.rows == 1:
            is_divided = False
        assumed = request.candidate
        candidates: Sequence[LossCandidate] = [assumed or candidate_of(request)]
        # Of one kind are steps for which other candidates are assumed.
        of_kind = request
        if assumed is not None:
            of_kind = replace(request, count=None)
            if is_divided:
                candidates = self.remaining(loop.candidates)
        question = Question(attempt, request, task, is_divided, candidates, loop)
        flags = attempt.replicas.of_model.flags
        kind, details = self.kinds.kind_of(of_kind, is_divided, flags)
        # A batch that leaves several candidates says nothing of the next one.
        if question.is_open_between(candidates):
            details = "open", kind.steps  # new in each step
        chosen = candidates[0]
        if kind.count_step(ranges_of_step(request), details):
            chosen = self.ask(question, kind)
        # The scope also holds in steps that are not looked at.
        return Choice(None if assumed is None else chosen, kind.scope)

    def ask(self, question: Question, kind: Kind) -> LossCandidate:
        """Look at a step. Refuses it, or tells what the look has found.

        Returns the first candidate that fits; the first one that may fit if looks are
        inconclusive.
        """
        try:
            # A look has other sizes than steps, for which no kernel is searched.
            with SETTINGS_KEPT, no_kernel_search():
                return self._ask(question, kind)
        finally:
            # After a refusal the same rows again: fewer may not show it.
            kind.looks += kind.stage is not Stage.REFUSED
            _drop_gradients(question.attempt)  # user code may compute some

    def _ask(self, question: Question, kind: Kind) -> LossCandidate:
        refusals: list[Verdict] = []
        unclear: list[_Unclear] = []
        for number, candidate in enumerate(question.candidates):
            title = question.title(kind.looks)
            try:
                choice = question.choice(candidate, kind.looks)
                with question.loop.around_looks():
                    verdict = look(question.attempt, question.task, choice)
            except Inconclusive as error:
                logger.debug("%s is inconclusive: %s", title, error)
                # Without its frames: one of them holds this list.
                unclear.append((candidate, error.with_traceback(None)))
                continue
            logger.debug("%s: %s", title, verdict.action.value)
            if verdict.action is Action.REFUSE:
                refusals.append(verdict)
                continue
            self._agree(question, kind, verdict)
            remaining = question.candidates[number:]
            rivals = alike(choice.request, verdict.parts, remaining)
            self._keep(rivals, question, kind)
            if question.is_open_between(rivals):
                self.warn(question.text_of_assumed(rivals))
            return candidate
        if unclear:
            return self._assume(unclear, question, kind)
        # Each step is looked at until one agrees: a remedy may be wrong, too.
        kind.stage = Stage.REFUSED
        refused = refusals[-1]
        raise ValueError(question.text_of_refusal(refused)) from refused.error

    def _assume(
        self, unclear: list[_Unclear], question: Question, kind: Kind
    ) -> LossCandidate:
        """Returns the likeliest of the candidates of inconclusive looks."""
        # Means first: a loss that ignores the number of items is none of their sum.
        unclear.sort(key=lambda entry: entry[0].reduction == "sum")
        remaining = [candidate for candidate, _ in unclear]
        self._keep(remaining, question, kind)
        assumed, reason = unclear[0]
        if len(remaining) > 1:
            reason.patience = 1  # the user can say which one holds
        # Of torch's own loss nothing is assumed that may be wrong.
        is_told = reason.is_final or not counts_as_torch(question.request)
        if kind.note_inconclusive(reason) and is_told:
            self.warn(question.text_of_unchecked(reason, assumed))
        return assumed

    def _keep(
        self, remaining: Sequence[LossCandidate], question: Question, kind: Kind
    ) -> None:
        """Refute all candidates but the remaining ones; tell a change of mind."""
        if len(question.candidates) == 1:
            return
        self._not_refuted = [candidate.words for candidate in remaining]
        logger.info("losses of micro-batches combine as %s", remaining[0].words)
        assumed = question.candidates[0]
        if remaining[0] is not assumed and kind.steps > 1:
            self.warn(question.text_of_change(assumed, remaining[0]))

    def _agree(self, question: Question, kind: Kind, verdict: Verdict) -> None:
        """Note that a look has not refused, and warn of what it has found."""
        self._widen_turns(question, kind, verdict.scope)
        moved = [name for name in verdict.moved if name not in self._told]
        if moved:
            self.warn(question.text_of_moved(moved), moved)
        if verdict.is_seeded:
            self.warn(_TEXT_OF_SEED)
        if verdict.lost:
            self.warn(_text_of_lost(verdict.lost[0]))
        # A single replica computes in the caller's thread.
        if len(question.attempt.plan.shares) > 1:
            # This is the caller's thread, in which the user has set them.
            names = [name for name, of in verdict.thread_locals.items() if vars(of)]
            if names:
                self.warn(_text_of_thread_locals(names), names)
        if verdict.action is Action.WARN:
            self.warn(verdict.text)
        kind.note_agreement()

    def _widen_turns(self, question: Question, kind: Kind, scope: Scope) -> None:
        """From now on a turn of steps of this kind includes ``scope``."""
        attempt = question.attempt
        # The part of a sub-step that one replica at a time runs, without the look.
        before = attempt.threads.scope
        # One call at a time disturbs nobody.
        is_alone = len(attempt.plan.shares) == 1 or question.request.whole_batch
        if is_alone and before < Scope.FUNCTION:
            return
        if scope <= max(kind.scope, before):
            return
        kind.scope = scope
        if before < Scope.FUNCTION:  # else the loop has said so
            self.warn(question.text_of_turns())
        logger.info("%s: a turn is %s", question.title(kind.looks), scope.name)


def candidate_of(request: Request) -> LossCandidate:
    """How the arguments of a step say that losses combine."""
    words = "a sum"
    if request.is_mean:
        terms = "rows" if request.count is None else "what count= gives"
        words = f"a mean over {terms}"
    return LossCandidate(words, request.reduction, request.count)


@dataclass(eq=False)
class Question:
    """A step that may be looked at: its rows and texts.

    Attributes:
        request: that of the largest batch.
        task: that of the first replica.
        is_divided: whether the step divides the batch into parts.
        candidates: how losses may combine; the first one is assumed so far.
        loop: the options of the loop, if a library calls the engine.
    """

    attempt: Attempt
    request: Request
    task: ReplicaTask
    is_divided: bool
    candidates: Sequence[LossCandidate]
    loop: LoopOptions

    def is_open_between(self, candidates: Sequence[LossCandidate]) -> bool:
        """Whether it matters in this step which of these candidates holds."""
        if len(candidates) < 2:
            return False
        # Micro-batches of equal rows and labels have one set of weights by all counts.
        parts = parts_of(self.attempt.plan)
        return len(alike(self.request, parts, candidates)) < len(candidates)

    def choice(self, candidate: LossCandidate, number: int) -> RowChoice:
        """How a look after ``number`` others chooses its rows, if losses combine as
        ``candidate`` says.

        Raises:
            Inconclusive: the loop cannot divide rows of this step.
        """
        plan = self.attempt.plan
        request = self.request.combined_by(candidate)
        divide = self.loop.divided
        if divide is not None and not request.whole_batch:
            try:
                inputs = divide(request.batches[0].inputs)
                batches = batches_of(inputs, None, request.dim)
            except ValueError as error:  # such as another number of images than of rows
                raise Inconclusive(str(error), patience=1) from None
            request = replace(request, batches=batches)
            # The plan of these rows alone: one of them was a whole batch for the loop.
            devices = [share.device for share in plan.shares]
            accum = 1 if len(devices) > 1 else 2
            plan = make_plan(request.rows, devices, accum)
        function = request.criterion
        if function is None:
            function = self.attempt.replicas.of_model.root.forward
        ignored = ignored_values(function, request.count)
        most = self._most_rows(request, plan, is_first=not number)
        # Read here: the replica's thread, in which rows are chosen, has its own device.
        tensors = informative_tensors(request)
        return RowChoice(request, tensors, plan, ignored, number, self.is_divided, most)

    def _most_rows(self, request: Request, plan: Plan, is_first: bool) -> int:
        """As many rows as are cheap: fewer of a large model, and in later looks."""
        rows_of_substep = max(plan.substep_rows)
        most = rows_of_substep // _SHARE_OF_LATER_LOOKS
        if is_first:
            most = rows_of_substep * _SUBSTEPS_OF_FIRST_LOOK
        parameters = self.attempt.replicas.of_model.root.parameters()
        if sum(parameter.numel() for parameter in parameters) > MAX_ELEMENTS:
            share_of_batch = request.rows // _SHARE_OF_LARGE_MODELS
            most = min(most, rows_of_substep, share_of_batch)
        # Inputs are copied to the device for the look alone, twice and in parts.
        affordable = affordable_rows(
            request.batches[0].without_targets().tensors(), request.rows
        )
        return min(max(_MIN_ROWS, most), affordable)

    @property
    def _name(self) -> str:
        return name_of(self.request)

    def title(self, looks: int) -> str:
        """The look after so many ``looks``, as the log names it."""
        return f"look {looks + 1} at {self._name}, {self.request.rows} rows"

    def text_of_turns(self) -> str:
        """The warning for a criterion that reads what forward passes leave behind."""
        return in_lines(
            f"{self._name} reads what forward passes leave behind (a hook?), which "
            "replicas share, so they take turns, which is slower.",
            f"To run them together, {RETURN}.",
            "Or pass verify=False.",
        )

    def text_of_moved(self, names: Sequence[str]) -> str:
        """The warning for state that sub-steps move."""
        if self.loop.lends:
            return in_lines(
                f"{self._name} writes {shown(', '.join(names))} in each call, once per "
                "micro-batch, as with gradient accumulation.",
                "Count steps where the loop counts them.",
            )
        return in_lines(
            f"forward passes move {shown(', '.join(names))}: at each sub-step, and on "
            "each replica apart; attributes have your values in the next step.",
            "Move it once per step, outside of forward, or keep it in a buffer and "
            "train with one sub-step; let a criterion see all rows at once "
            "(whole_batch=True; of the pair: gather).",
            "docs/limits.md, State in modules.",
        )

    def text_of_refusal(self, verdict: Verdict) -> str:
        """The error of a refused step, with the remedies of its loop if it has any."""
        if not (verdict.problem and self.loop.remedies):
            return verdict.text
        problem = verdict.problem
        if len(self.candidates) > 1:
            ways = ", ".join(candidate.words for candidate in self.candidates)
            problem += f" It is none of these: {ways}."
        if verdict.cause:
            problem += f" {verdict.cause}"
        return f"{problem}\n{self.loop.remedies} Nothing was changed."

    def text_of_assumed(self, candidates: Sequence[LossCandidate]) -> str:
        """The warning for rows that leave several candidates."""
        ways = " or ".join(candidate.words for candidate in candidates)
        return in_lines(
            f"the rows of this step do not show whether {self._name} is {ways}.",
            f"It is taken for {candidates[0].words} until rows show it. "
            f"{self.loop.remedies}",
        )

    def text_of_change(self, before: LossCandidate, after: LossCandidate) -> str:
        """The warning for a run in which another candidate was assumed so far."""
        return in_lines(
            f"{self._name} is {after.words}, as the rows of this step show.",
            f"Earlier steps took it for {before.words}. {self.loop.remedies}",
        )

    def text_of_unchecked(self, error: Inconclusive, assumed: LossCandidate) -> str:
        """The warning for inconclusive looks, with the assumption and what to pass."""
        if self.request.whole_batch:
            return in_lines(
                f"could not check {self._name} with whole_batch=True: {error.shown}.",
                "To check it, call engine.check(inputs, targets, criterion, "
                "whole_batch=True) once, with a batch that fits on one device.",
                "verify=False does not check.",
            )
        # A generator in user code is no question of count=.
        ways = error.remedy or self.loop.remedies or _WAYS
        return in_lines(
            f"could not check how {self._name} combines the parts of a batch: "
            f"{error.shown}.",
            f"It is taken for {assumed.words}. {ways}",
        )


def _text_of_lost(shape: tuple[int, ...]) -> str:
    return in_lines(
        f"your code writes a tensor of shape {shape}, above 64 MiB, which a look at a "
        "few rows did not save.",
        "Keep it in a buffer of the module, or pass verify=False.",
    )


def _text_of_thread_locals(names: Sequence[str]) -> str:
    return in_lines(
        "forward or the criterion refers to a threading.local, of which each thread "
        f"has attributes of its own: {', '.join(names)}. Replicas compute in threads "
        "of theirs, which have not what yours has set.",
        "Use a contextvars.ContextVar, which they have, too, or an attribute.",
    )


def _drop_gradients(attempt: Attempt) -> None:
    """Drop gradients of user code, in replicas and in the user's leaves."""
    for replica_set in attempt.replicas.replica_sets:
        replica_set.clear_gradients()
    for leaf in attempt.user_leaves:
        leaf.grad = None
