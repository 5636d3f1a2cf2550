"""The order of causes, and what weights and growths mean."""

from __future__ import annotations

import pytest
import torch

from scatterpar.causes.cause_list import first_finding, kind_of_weights
from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import CauseKind, Growth, SplitEvidence, Weights

LABELS = Count("labels", "batch", (1, 2))


class Answers(SplitEvidence):
    """SplitEvidence with the answers that a test gives, to kinds and by name."""

    parts = ((0,), (1,))
    counts = (LABELS,)
    tolerance = 1e-4

    def __init__(self, *kinds, **answers):
        self.kinds = kinds
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)

    def questions(self):
        return {kind: lambda kind=kind: kind in self.kinds for kind in CauseKind}


def weights(computed, right):
    return Weights(torch.tensor(computed), torch.tensor(right))


STATE, COMPARED = CauseKind.STATE_BETWEEN_PARTS, CauseKind.ROWS_ARE_COMPARED
WITH_ONE, NOT_FINITE = CauseKind.WRONG_WITH_ONE_PART, CauseKind.NOT_FINITE


@pytest.mark.parametrize(
    ("kinds", "answers", "kind"),
    [
        ([], {}, CauseKind.UNKNOWN),
        ([COMPARED], {}, COMPARED),
        ([COMPARED], {"count_that_decides": LABELS}, CauseKind.MEAN_OF_MEANS),
        ([STATE], {"count_that_decides": LABELS}, STATE),
        ([STATE], {"factor": 4.0}, CauseKind.CONSTANT_FACTOR),
        ([], {"factor": 0.0}, CauseKind.NO_GRADIENT),
        ([], {"factor": 1.0}, CauseKind.UNKNOWN),
        ([], {"weights": weights([0.5, 0.5], [0.7, 0.3])}, CauseKind.MEAN_OF_MEANS),
        ([], {"weights": weights([0.5, 0.5], [0.5, 0.5])}, CauseKind.UNKNOWN),
        ([], {"factor": 2.0, "differing_ranks": ["weight"]}, CauseKind.RANKS_DIFFER),
        ([WITH_ONE], {"factor": 2.0}, WITH_ONE),
        ([NOT_FINITE, WITH_ONE], {"factor": 2.0}, NOT_FINITE),
    ],
)
def test_first_fitting_cause_is_found(kinds, answers, kind):
    finding, failures = first_finding(Answers(*kinds, **answers))
    assert finding.kind is kind
    assert not failures


def test_question_that_nobody_answers_is_no_cause():
    assert first_finding(SplitEvidence())[0].kind is CauseKind.UNKNOWN


def test_cause_that_cannot_be_tested_is_passed_over():
    def fails():
        raise ZeroDivisionError("no labels")

    class Failing(Answers):
        def questions(self):
            return super().questions() | {STATE: fails}

    finding, failures = first_finding(Failing(COMPARED))
    assert finding.kind is COMPARED
    assert [str(error) for error in failures] == ["no labels"]


@pytest.mark.parametrize(
    ("factor", "expected", "cosine", "is_found"),
    [
        (2.0, 2.0, 1.0, True),
        (1.6, 1.6, 1.0, True),  # each of three parts of two ranks, then of three
        (2.2, 2.0, 0.95, True),
        (2.0, 1.6, 1.0, False),
        (2.0, 2.0, 0.5, False),
        (1.0, 1.0, 1.0, False),  # it does not depend on their number
    ],
)
def test_term_of_each_part_grows_as_expected(factor, expected, cosine, is_found):
    growth = Growth("part", factor, expected, cosine)
    finding, _ = first_finding(Answers(growths=[growth]))
    assert (finding.kind is CauseKind.ONCE_PER_PART) == is_found


@pytest.mark.parametrize(
    ("computed", "right", "kind"),
    [
        ([0, 0, 1], [0.5, 0.3, 0.2], CauseKind.ONLY_SOME_PARTS),
        ([1 / 3, 1 / 3, 1 / 3], [0.5, 0.3, 0.2], CauseKind.MEAN_OF_MEANS),
        # One of four parts has no terms.
        ([1 / 4, 1 / 4, 1 / 4], [0.5, 0.3, 0.2], CauseKind.MEAN_OF_MEANS),
        ([1, 1, 1], [0.5, 0.3, 0.2], CauseKind.SUM_OF_MEANS),
        ([3, 2, 1], [0.5, 0.3, 0.2], CauseKind.RUNNING_SUM),
        ([1.5, 0.6, 0.2], [0.5, 0.3, 0.2], CauseKind.RUNNING_SUM),  # of sums
        ([0.2, 0.3, 0.6], [0.5, 0.3, 0.2], CauseKind.OTHER_WEIGHTS),
    ],
)
def test_weights_of_parts_are_named(computed, right, kind):
    numbers = torch.tensor(computed, dtype=torch.float64), torch.tensor(right)
    assert kind_of_weights(*numbers, num_parts=4) is kind
