"""The engine's looks: when, and the errors and warnings that follow.

::

    look_if_due     before the sub-steps    is a look due in this step?
    look_at         a step, or a call       state is as before, whatever becomes of it
    _decide                                 refuse, agree, or assume: the one place

``_judged`` in ``look.py`` finds whether the results of a look differ. ``_decide`` says
what becomes of the step.

The only error of a look is its ``ValueError``. If looks stay inconclusive, one warning
says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from scatterpar.devices.memory import no_kernel_search
from scatterpar.errors import warn
from scatterpar.log import logger
from scatterpar.numerics.comparison import Inconclusive, NoTerms, SaysNothing
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import counts_as_torch
from scatterpar.step.request import LossCandidate
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.threads.process_settings import SETTINGS_KEPT
from scatterpar.verify import look_words
from scatterpar.verify.choice import CandidateFit, alike, best_fits, candidate_of
from scatterpar.verify.look import look
from scatterpar.verify.look_request import (
    LookRequest,
    LossWays,
    choose_rows,
    is_open_between,
)
from scatterpar.verify.rows import common_size
from scatterpar.verify.schedule import Kind, Kinds, Stage, ranges_of_step
from scatterpar.verify.verdicts import Action, LookReport, Verdict

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
        # Subjects and texts of warnings, and the names of state in them.
        self._waiting: list[tuple[Hashable, str, Sequence[str]]] = []
        # The subjects of warnings so far, and the names of state in them.
        self._told: set[Hashable] = set()

    def look_if_due(self, attempt: Attempt, task: ReplicaTask) -> Scope:
        """Look at some rows, before the sub-steps, if that is due.

        Returns which part of a sub-step one replica at a time runs.

        Raises:
            ValueError: a replica, in parts, gives another loss or gradient than the
                user's own module and criterion for the same rows.
        """
        self._waiting.clear()  # of a step that has failed
        request = attempt.request.of_largest_batch()
        is_divided = self._is_distributed or len(attempt.plan.substep_rows) > 1
        # The criterion gets the one row, whatever the number of replicas.
        if request.whole_batch and request.rows == 1:
            is_divided = False
        flags = attempt.replicas.of_model.flags
        with attempt.span("verify"):
            kind, details = self.kinds.kind_of(request, is_divided, flags)
            is_due = kind.count_step(ranges_of_step(request), details)
            # A last batch may have as many rows per micro-batch as a table has entries.
            if is_divided and request.whole_batch and not is_due:
                is_due = kind.may_join(common_size(attempt.plan))
            if is_due:
                candidates = [candidate_of(request)]
                look_request = LookRequest(
                    attempt, request, task, is_divided, candidates, LossWays()
                )
                self.look_at(look_request, kind)
        # The scope also holds in steps that are not looked at.
        return kind.scope

    def warn(self, subject: Hashable, text: str, names: Sequence[str] = ()) -> None:
        """Warn when the step has succeeded, once per ``subject``: numbers in a text
        differ from step to step.

        ``names`` are those of state that the text names.
        """
        self._waiting.append((subject, text, names))

    def tell(self) -> None:
        """Warn, after a step that has succeeded, of what the look has found."""
        for subject, text, names in self._waiting:
            if subject not in self._told:
                self._told.update([subject, *names])
                warn(text)
        self._waiting.clear()

    def look_at(self, look_request: LookRequest, kind: Kind) -> LossCandidate:
        """Look at a step, and decide.

        Returns the candidate that is taken.

        Raises:
            ValueError: the step is refused.
        """
        replicas = look_request.attempt.replicas
        try:
            # A look has other sizes than steps, for which no kernel is searched.
            with SETTINGS_KEPT, no_kernel_search(), replicas.values_remembered():
                return self._decide(look_request, kind)
        finally:
            # After a refusal the same rows again: fewer may not show it.
            kind.looks += kind.stage is not Stage.REFUSED
            _drop_gradients(look_request.attempt)  # user code may compute some

    def _decide(self, look_request: LookRequest, kind: Kind) -> LossCandidate:
        """Refuse the step, or note what the look has found.

        Returns the candidate that fits best; the first one that may fit if looks are
        inconclusive.
        """
        refusals: list[Verdict] = []
        unclear: list[_Unclear] = []
        reports: list[LookReport] = []
        fits: list[CandidateFit] = []
        pending = [*look_request.candidates]
        while pending:
            candidate = pending[0]
            title = look_request.title(kind.looks)
            try:
                row_choice = choose_rows(look_request, candidate, kind.looks)
                report = look(look_request.attempt, look_request.task, row_choice)
            except Inconclusive as error:
                logger.debug("%s is inconclusive: %s", title, error)
                # Without its frames: one of them holds this list.
                unclear.append((candidate, error.with_traceback(None)))
                del pending[0]
                continue
            logger.debug("%s: %s", title, report.verdict.action.value)
            # They give the same result, which is not computed again.
            same = pending
            for parts in report.compared:
                same = alike(row_choice.request, parts, same)
            pending = [other for other in pending if other not in same]
            ways = look_request.ways
            is_compared = report.verdict.compares_rows and ways.refuses_compared_rows
            if report.verdict.action is Action.REFUSE or is_compared:
                refusals.append(report.verdict)
                continue
            reports.append(report)
            fits += [CandidateFit(other, report.misfit, report.eps) for other in same]
        if fits:
            self._agree(look_request, kind, min(reports, key=lambda r: r.misfit))
            return self._choose(fits, unclear, look_request, kind)
        if unclear:
            return self._assume(unclear, look_request, kind)
        # Each step is looked at until one agrees: a remedy may be wrong, too.
        kind.stage = Stage.REFUSED
        refused = refusals[-1]
        text = look_words.step_is_refused(look_request, refused)
        raise ValueError(text) from refused.error

    def _choose(
        self,
        fits: Sequence[CandidateFit],
        unclear: Sequence[_Unclear],
        look_request: LookRequest,
        kind: Kind,
    ) -> LossCandidate:
        """Returns the candidate that fits best; keeps those that may fit as well.

        If it matters in this step which of them holds, one more look takes other rows,
        or divides them otherwise.
        """
        remaining = best_fits(fits)
        for candidate, reason in unclear:
            # A mean over terms that these rows have not: it would be no number.
            if not isinstance(reason, NoTerms):
                remaining.append(candidate)
        self._keep(remaining, look_request, kind)
        plan = look_request.attempt.plan
        ways = look_request.ways
        is_open = is_open_between(look_request.request, plan, remaining)
        if is_open and not ways.parts_are_equal:
            if not look_request.is_again:
                # By chance, parts of these rows may weigh the same by all of them.
                kind.looks += 1
                again = replace(look_request, candidates=remaining, is_again=True)
                return self._decide(again, kind)
            self.warn_of_several(look_request.loss, remaining, ways.remedies, kind)
        return remaining[0]

    def warn_of_several(
        self,
        loss: str,
        candidates: Sequence[LossCandidate],
        remedies: str,
        kind: Kind,
    ) -> None:
        """Warn that the first of several candidates is assumed."""
        kind.has_assumed = True
        text = look_words.several_candidates_fit(loss, candidates, remedies)
        self.warn(("several candidates", loss), text)

    def _assume(
        self, unclear: list[_Unclear], look_request: LookRequest, kind: Kind
    ) -> LossCandidate:
        """Returns the likeliest of the candidates of inconclusive looks."""
        # Means first: a loss that ignores the number of items is none of their sum.
        unclear.sort(key=lambda entry: entry[0].reduction == "sum")
        remaining = [candidate for candidate, _ in unclear]
        self._keep(remaining, look_request, kind)
        assumed, reason = unclear[0]
        if len(look_request.candidates) > 1:
            reason.patience = 1  # the user can say which one holds
            kind.has_assumed |= len(remaining) > 1
        # Of torch's own loss nothing is assumed that may be wrong.
        is_told = reason.is_final or not counts_as_torch(look_request.request)
        # Zeros, or NaN: of these every rule gives the same.
        if look_request.ways.parts_are_equal and isinstance(reason, SaysNothing):
            is_told = False
        if kind.note_inconclusive(reason) and is_told:
            text = look_words.looks_are_inconclusive(look_request, reason, assumed)
            is_joined = look_request.request.whole_batch
            self.warn(("inconclusive", look_request.loss, is_joined), text)
        return assumed

    def _keep(
        self, remaining: Sequence[LossCandidate], look_request: LookRequest, kind: Kind
    ) -> None:
        """Refute all candidates but the remaining ones; tell a change of mind."""
        if len(look_request.candidates) == 1:
            return
        kind.not_refuted = [candidate.words for candidate in remaining]
        logger.info("losses of micro-batches combine as %s", remaining[0].words)
        assumed = look_request.candidates[0]
        # Before, all that remained gave the same, unless a step has assumed one.
        if remaining[0] is not assumed and kind.has_assumed:
            text = look_words.another_candidate_fits(look_request, remaining[0])
            self.warn(("candidate", look_request.loss, remaining[0].words), text)

    def _agree(self, look_request: LookRequest, kind: Kind, report: LookReport) -> None:
        """Note that a look has not refused, and warn of what it has found."""
        effects = report.effects
        self._widen_turns(look_request, kind, effects.scope)
        moved = [name for name in effects.moved if name not in self._told]
        if moved and look_request.ways.tells_moved_state:
            text = look_words.state_is_moved(look_request, moved)
            self.warn(("moved state", *moved), text, moved)
        if effects.lost:
            shape = effects.lost[0]
            self.warn(("lost", shape), look_words.tensor_was_not_saved(shape))
        if report.verdict.action is Action.WARN:
            self.warn(report.verdict.subject, report.verdict.text)
        kind.sizes_without_rows.update(report.sizes_without_rows)
        kind.note_agreement()

    def _widen_turns(self, look_request: LookRequest, kind: Kind, scope: Scope) -> None:
        """Let a turn of steps of this kind include ``scope``, from now on."""
        attempt = look_request.attempt
        # One call at a time disturbs nobody.
        if len(attempt.plan.shares) == 1 or look_request.request.whole_batch:
            return
        if scope <= max(kind.scope, attempt.threads.scope):
            return
        kind.scope = scope
        text = look_words.turns_are_taken(look_request)
        self.warn(("turns", look_request.loss), text)
        title = look_request.title(kind.looks)
        logger.info("%s: one replica at a time runs: %s", title, scope.name)


def _drop_gradients(attempt: Attempt) -> None:
    """Drop gradients of user code, in replicas and in the user's leaves."""
    for replica_set in attempt.replicas.replica_sets:
        replica_set.clear_gradients()
    for leaf in attempt.user_leaves:
        leaf.grad = None
