"""The texts of what looks tell: what each has of the step, of its loop, of the look."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from scatterpar.batch.batch import batch_of
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.step.request import LossCandidate, Request
from scatterpar.verify import look_words
from scatterpar.verify.look_request import LookRequest, LossWays
from scatterpar.verify.verdicts import Action, Verdict

BY_ROWS = LossCandidate("a mean over rows")
A_SUM = LossCandidate("a sum", "sum")
REMEDIES = "Pass count= to the Loop."


def asked(candidates=(BY_ROWS,), whole_batch=False, **ways):
    """A request for a look at a step with ``nn.MSELoss``."""
    batch = batch_of(None, None, 4, 0)
    request = Request([batch], 0, nn.MSELoss(), whole_batch=whole_batch)
    return LookRequest(None, request, None, True, candidates, LossWays(**ways))


def inconclusive(**options):
    return Inconclusive("all gradients are zero", **options)


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        (
            look_words.turns_are_taken(asked()),
            "the criterion MSELoss reads a value that forward passes leave behind",
            "return this value from forward",
        ),
        (
            look_words.state_is_moved(asked(), ["the buffer 'a'", "the number b"]),
            "forward passes move the buffer 'a', the number b: each sub-step",
            "Change this state once per step, outside of forward",
        ),
        (
            look_words.tensor_was_not_saved((3, 4)),
            "your code writes a tensor of shape (3, 4), above 64 MiB",
            "Register the tensor as a buffer of the module",
        ),
        (
            look_words.several_candidates_fit(
                "the criterion MSELoss", [A_SUM, BY_ROWS], REMEDIES
            ),
            "not show whether the criterion MSELoss is a sum or a mean over rows.",
            "The engine assumes a sum until the rows of a step show which "
            f"one is right. {REMEDIES}",
        ),
        (
            look_words.another_candidate_fits(asked(remedies=REMEDIES), A_SUM),
            "the criterion MSELoss is a sum, as the rows of this step show.",
            "Earlier steps assumed a mean over rows: their gradients may be wrong. "
            f"{REMEDIES}",
        ),
        (
            look_words.looks_are_inconclusive(
                asked(whole_batch=True), inconclusive(), A_SUM
            ),
            "could not check the criterion MSELoss with whole_batch=True: all gradie",
            "call engine.check(inputs, targets, criterion, whole_batch=True) once",
        ),
        (
            look_words.looks_are_inconclusive(asked(), inconclusive(), A_SUM),
            "could not check how the criterion MSELoss combines the parts of a batch: ",
            "The engine assumes a sum. Pass count= for a mean over something else",
        ),
    ],
)
def test_problem_then_remedy(text, problem, remedy):
    first, second, *_ = text.splitlines()
    assert problem in first
    assert remedy in second


def test_remedy_of_reason_before_that_of_caller():
    def remedy(request, **options):
        reason = inconclusive(**options)
        text = look_words.looks_are_inconclusive(request, reason, BY_ROWS)
        return text.splitlines()[1].removeprefix(
            "The engine assumes a mean over rows. "
        )

    assert remedy(asked(remedies=REMEDIES)) == REMEDIES
    assert remedy(asked(remedies=REMEDIES), remedy="Seed it.") == "Seed it."
    assert remedy(asked(), remedy="Seed it.") == "Seed it."


def test_refusal_names_the_callers_remedies():
    """Not those of the engine, and not if losses are not the reason."""
    verdict = Verdict(
        Action.REFUSE,
        "as the engine",
        problem="Off by 3.",
        cause="Sum",
        argument="a sum",
    )
    several = asked((BY_ROWS, A_SUM), remedies=REMEDIES)
    assert look_words.step_is_refused(several, verdict) == (
        "Off by 3. It is none of these: a mean over rows, a sum. Sum: pass a sum.\n"
        f"{REMEDIES} Nothing was changed."
    )
    one = asked(remedies=REMEDIES)
    text = look_words.step_is_refused(one, verdict)
    assert text.startswith("Off by 3. Sum: pass a sum.\nPass")
    call = replace(one, ways=replace(one.ways, take_arguments=False))
    text = look_words.step_is_refused(call, verdict)
    assert text.startswith("Off by 3. Sum.\nPass")
    unknown = Verdict(Action.REFUSE, "as the engine", problem="Off by 3.")
    assert look_words.step_is_refused(one, unknown).startswith("Off by 3.\nPass")
    assert look_words.step_is_refused(asked(), verdict) == "as the engine"
    other = Verdict(Action.REFUSE, "as the engine")
    assert look_words.step_is_refused(several, other) == "as the engine"
