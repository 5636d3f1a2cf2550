"""The texts of warnings after a look, and of refusals that name a loop's arguments.

A function for each thing that looks tell. The words of causes are in ``verdicts``.
"""

from __future__ import annotations

from collections.abc import Sequence

from scatterpar.numerics.comparison import Inconclusive
from scatterpar.step.request import LossCandidate
from scatterpar.tables import shortened
from scatterpar.verify.look_request import LookRequest
from scatterpar.verify.verdicts import RETURN, Verdict, in_lines

_WAYS = (
    "Pass count= for a mean over something else, such as scatterpar.count_labels(), "
    'reduction="sum" for a sum, or whole_batch=True if the loss compares rows. '
    "engine.check(inputs, targets, criterion) compares all gradients of a batch that "
    "fits on one device. verify=False does not check."
)


# --- what calls of user code do ---


def turns_are_taken(look_request: LookRequest) -> str:
    """A criterion reads what forward passes leave behind."""
    return in_lines(
        f"{look_request.loss} reads a value that forward passes leave behind, for "
        "example by a hook. All replicas share this value, so they compute one after "
        "the other, which is slower.",
        f"The results are right. To let replicas compute at the same time, {RETURN}.",
        "Or pass verify=False.",
    )


def state_is_moved(look_request: LookRequest, names: Sequence[str]) -> str:
    """Sub-steps move state with these ``names``."""
    return in_lines(
        f"forward passes move {shortened(', '.join(names))}: each sub-step and each "
        "replica changes these values separately, so the values depend on how the "
        "batch is divided.",
        "Change this state once per step, outside of forward. If forward has to change "
        "it, keep it in a buffer, and train on one replica with one sub-step. If the "
        "criterion changes it, keep it in a buffer of the criterion, and pass "
        "whole_batch=True. With the pair, call the criterion on "
        "gather(outputs, device).",
        "Attributes begin the next step with the values that they have in your module. "
        "docs/limits.md, State in modules.",
    )


def tensor_was_not_saved(shape: tuple[int, ...]) -> str:
    """User code writes a tensor that is too large to be saved."""
    return in_lines(
        f"your code writes a tensor of shape {shape}, above 64 MiB. The check before "
        "a step ran your code, and cannot undo this write.",
        "Register the tensor as a buffer of the module: its values are restored after "
        "the check. Or pass verify=False, which leaves the check out.",
    )


# --- how losses combine ---


def several_candidates_fit(
    loss: str, candidates: Sequence[LossCandidate], remedies: str
) -> str:
    """The rows leave these candidates, of which the first one is assumed."""
    mean_or_sum = " or ".join(candidate.words for candidate in candidates)
    first_of_these = candidates[0].words
    return in_lines(
        f"the rows of this step do not show whether {loss} is {mean_or_sum}.",
        f"The engine assumes {first_of_these} until the rows of a step "
        f"show which one is right. {remedies}",
    )


def another_candidate_fits(look_request: LookRequest, candidate: LossCandidate) -> str:
    """The rows show another candidate than the one that was assumed so far."""
    right_one = candidate.words
    another = look_request.candidates[0].words
    remedies = look_request.ways.remedies
    return in_lines(
        f"{look_request.loss} is {right_one}, as the rows of this step show.",
        f"Earlier steps assumed {another}: their gradients may be wrong. {remedies}",
    )


def looks_are_inconclusive(
    look_request: LookRequest, reason: Inconclusive, assumed: LossCandidate
) -> str:
    """Why, what is assumed, and what to pass."""
    if look_request.request.whole_batch:
        return in_lines(
            f"could not check {look_request.loss} with whole_batch=True: "
            f"{reason.shown}.",
            "To check it, call engine.check(inputs, targets, criterion, "
            "whole_batch=True) once, with a batch that fits on one device.",
            "verify=False does not check.",
        )
    # A generator in user code is no question of count=.
    remedies = reason.remedy or look_request.ways.remedies or _WAYS
    assumed_one = assumed.words
    return in_lines(
        f"could not check how {look_request.loss} combines the parts of a batch: "
        f"{reason.shown}.",
        f"The engine assumes {assumed_one}. {remedies}",
    )


def step_is_refused(look_request: LookRequest, verdict: Verdict) -> str:
    """The error, with the remedies of the caller if it has any."""
    remedies = look_request.ways.remedies
    if not (verdict.problem and remedies):
        return verdict.text
    problem = verdict.problem
    if len(look_request.candidates) > 1:
        ways = ", ".join(candidate.words for candidate in look_request.candidates)
        problem += f" It is none of these: {ways}."
    if verdict.argument and look_request.ways.take_arguments:
        problem += f" {verdict.cause}: pass {verdict.argument}."
    elif verdict.cause:
        problem += f" {verdict.cause}."
    return f"{problem}\n{remedies} Nothing was changed."
