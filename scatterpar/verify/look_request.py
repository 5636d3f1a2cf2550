"""The request of a look: the step, and the rows that it may choose.

::

    look            number of rows
    the first       as many as two micro-batches have
    later ones      a quarter of a micro-batch
    large models    at most a micro-batch, and an eighth of the batch

There are nine at least, unless a row needs much memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scatterpar.plan import Plan
from scatterpar.step.attempt import Attempt
from scatterpar.step.request import LossCandidate, Request
from scatterpar.step.task import ReplicaTask
from scatterpar.verify.choice import alike
from scatterpar.verify.look_results import name_of_loss
from scatterpar.verify.results import MAX_ELEMENTS
from scatterpar.verify.rows import (
    RowChoice,
    affordable_rows,
    ignored_values,
    parts_of_plan,
)
from scatterpar.verify.schedule import informative_tensors

_FEWEST_ROWS = 9
_SUBSTEPS_OF_FIRST_LOOK = 2
_SHARE_OF_LATER_LOOKS = 4
_SHARE_OF_LARGE_MODELS = 8  # because each row takes long


@dataclass(frozen=True)
class LossWays:
    """How losses of a caller other than ``forward_backward`` may combine.

    Attributes:
        remedies: sentences for refusals, which say what to do there. Empty: the
            arguments of ``forward_backward``.
        candidates: ways in which losses of parts may combine, the likeliest first. The
            first one that fits a few rows is taken. Empty: the request says how.
        tells_moved_state: whether a look warns of state that calls of the module move.
        parts_are_equal: whether the numbers of all parts are equal, and have no
            gradient: then it does not matter which mean holds.
        refuses_compared_rows: whether a module that compares rows is refused, not
            warned of.
        take_arguments: whether the caller takes ``count=`` and ``reduction=``.
    """

    remedies: str = ""
    candidates: Sequence[LossCandidate] = ()
    tells_moved_state: bool = True
    parts_are_equal: bool = False
    refuses_compared_rows: bool = False
    take_arguments: bool = True


@dataclass(frozen=True, eq=False)
class LookRequest:
    """A step that may be looked at.

    Attributes:
        attempt: the step's, whose replicas and threads compute the look.
        request: that of the largest batch.
        task: that of the first replica.
        is_divided: whether the step divides the batch into parts.
        candidates: how losses may combine; the first one is assumed so far.
        ways: how the losses of a caller may combine, in its words.
        is_again: whether another look at this step has left several candidates.
    """

    attempt: Attempt
    request: Request
    task: ReplicaTask
    is_divided: bool
    candidates: Sequence[LossCandidate]
    ways: LossWays
    is_again: bool = False

    @property
    def loss(self) -> str:
        """The criterion, or the module's own loss, as texts name it."""
        return name_of_loss(self.request)

    def title(self, looks: int) -> str:
        """The look after so many ``looks``, as the log names it."""
        return f"check {looks + 1} of {self.loss}, {self.request.rows} rows"


def is_open_between(
    request: Request, plan: Plan, candidates: Sequence[LossCandidate]
) -> bool:
    """Whether it matters in this step which of these candidates holds."""
    if len(candidates) < 2:
        return False
    # Micro-batches of equal rows and labels have one set of weights by all counts.
    return len(alike(request, parts_of_plan(plan), candidates)) < len(candidates)


def choose_rows(
    look_request: LookRequest, candidate: LossCandidate, number: int
) -> RowChoice:
    """Choose how a look after ``number`` others takes its rows, if losses combine as
    ``candidate`` says.
    """
    request = look_request.request.combined_by(candidate)
    plan = look_request.attempt.plan
    module = look_request.attempt.replicas.of_model.root
    function = module.forward if request.criterion is None else request.criterion
    num_elements = sum(parameter.numel() for parameter in module.parameters())
    return RowChoice(
        request,
        # Read here: the replica's thread, in which rows are chosen, has its own device.
        tensors=informative_tensors(request),
        plan=plan,
        ignored=ignored_values(function, request.count),
        number=number,
        is_divided=look_request.is_divided,
        most=_most_rows(request, plan, number, is_large=num_elements > MAX_ELEMENTS),
    )


def _most_rows(request: Request, plan: Plan, number: int, *, is_large: bool) -> int:
    """As many rows as are cheap: fewer of a large model, and in later looks."""
    rows_of_substep = max(plan.substep_rows)
    most = rows_of_substep // _SHARE_OF_LATER_LOOKS
    if not number:
        most = rows_of_substep * _SUBSTEPS_OF_FIRST_LOOK
    if is_large:
        share_of_batch = request.rows // _SHARE_OF_LARGE_MODELS
        most = min(most, rows_of_substep, share_of_batch)
    # Inputs are copied to the device for the look alone, twice and in parts.
    inputs = request.batches[0].without_targets().tensors()
    return min(max(_FEWEST_ROWS, most), affordable_rows(inputs, request.rows))
