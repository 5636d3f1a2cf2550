"""The order of causes, and what weights and growths mean."""

from __future__ import annotations

import pytest
import torch

from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import CauseKind, Growth, SplitEvidence, Weights
from scatterpar.causes.ordered import first_finding, kind_of_weights

LABELS = Count("labels", "batch", (1, 2))


class Answers(SplitEvidence):
    """SplitEvidence with the answers that a test gives."""

    parts = ((0,), (1,))
    counts = (LABELS,)
    tolerance = 1e-4

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)


def weights(computed, right):
    return Weights(torch.tensor(computed), torch.tensor(right))


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ({}, CauseKind.UNKNOWN),
        ({"do_rows_meet": True}, CauseKind.ROWS_ARE_COMPARED),
        ({"do_rows_meet": True, "count_that_decides": LABELS}, CauseKind.MEAN_OF_MEANS),
        (
            {"count_that_decides": LABELS, "depends_on_earlier_parts": True},
            CauseKind.STATE_BETWEEN_PARTS,
        ),
        ({"depends_on_earlier_parts": True, "factor": 4.0}, CauseKind.CONSTANT_FACTOR),
        ({"factor": 0.0}, CauseKind.NO_GRADIENT),
        ({"factor": 1.0}, CauseKind.UNKNOWN),
        ({"weights": weights([0.5, 0.5], [0.7, 0.3])}, CauseKind.MEAN_OF_MEANS),
        ({"weights": weights([0.5, 0.5], [0.5, 0.5])}, CauseKind.UNKNOWN),
        ({"factor": 2.0, "differing_ranks": ["weight"]}, CauseKind.RANKS_DIFFER),
        (
            {"factor": 2.0, "is_wrong_with_one_part": True},
            CauseKind.WRONG_WITH_ONE_PART,
        ),
        ({"factor": 2.0, "is_finite": False}, CauseKind.NOT_FINITE),
    ],
)
def test_first_fitting_cause_is_found(answers, kind):
    finding, failures = first_finding(Answers(**answers))
    assert finding.kind is kind
    assert not failures


def test_cause_that_cannot_be_tested_is_passed_over():
    class Failing(Answers):
        def depends_on_earlier_parts(self):
            raise ZeroDivisionError("no labels")

    finding, failures = first_finding(Failing(do_rows_meet=True))
    assert finding.kind is CauseKind.ROWS_ARE_COMPARED
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
