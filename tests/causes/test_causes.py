"""Causes of a wrong gradient: counts, weights, evidence, and their order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scatterpar import Rows
from scatterpar.causes import vectors
from scatterpar.causes.batch_normalisation import uses_batch_statistics
from scatterpar.causes.cause_list import (
    first_finding,
    kind_of_weights,
    other_weights,
)
from scatterpar.causes.counts import Count, counts_of, named_tensors
from scatterpar.causes.evidence import (
    CauseKind,
    Finding,
    Growth,
    SplitEvidence,
    Weights,
)

# --- what a loss may divide by, counted per row ---


LABELS = torch.tensor([[1, -100, -100], [1, 2, 3], [-100, 4, -100]])


def counted(batch):
    return {count.words: count for count in counts_of(named_tensors(batch), 3)}


def test_labels_before_integers_before_floats():
    ids = torch.zeros(3, 2, dtype=torch.long)
    weights = torch.tensor([0.5, 0.0, 0.9])
    batch = {"weights": weights, "ids": ids, "labels": LABELS}
    counts = counts_of(named_tensors(batch), 3)
    paths = dict.fromkeys(count.path for count in counts)
    assert list(paths) == [
        "",
        *(f'batch["{key}"]' for key in ("labels", "ids", "weights")),
    ]


def test_rows_count_elements_of_entries():
    (named,) = named_tensors(Rows([torch.ones(3), torch.ones(2, 2)], list))
    assert named.tensor.tolist() == [3, 4]


def test_terms_are_counted_by_row():
    counts = counted([LABELS])
    assert counts["rows"].per_row == (1, 1, 1)
    labels = counts["labels that are not -100"]
    assert labels.per_row == (1, 3, 1)
    assert labels.path == "batch[0]"
    assert labels.is_selective
    assert labels.of([1, 2]) == 4
    first = counts["labels that are not -100, without the first of a row"]
    assert first.per_row == (0, 2, 1)
    last = counts["labels that are not -100, without the last of a row"]
    assert last.per_row == (1, 2, 1)
    assert not counts["labels that are not 255"].is_selective


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float16])
def test_entries_of_masks_are_counted(dtype):
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).to(dtype)
    counts = counted(mask)
    assert counts["entries that are not 0"].per_row == (2, 1, 0)
    assert counts["entries that are 0"].per_row == (0, 1, 2)
    assert counted(torch.ones(3, 2))["entries that are not 0"].is_selective


def test_weights_and_lengths_are_summed():
    assert counted(torch.tensor([3, 1, 2]))["sum of batch"].per_row == (3, 1, 2)
    weights = torch.tensor([[0.5, 1.0], [0.0, 0.0], [2.0, 0.5]])
    assert counted({"w": weights})['sum of batch["w"]'].per_row == (1.5, 0, 2.5)
    assert "sum of batch" not in counted(-weights)


# --- factors and weights, with numbers that can be computed by hand ---


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_factor_is_found_if_there_is_one():
    assert vectors.factor_between(numbers(3, -6), numbers(1, -2), 1e-9) == 3
    assert vectors.factor_between(numbers(3, -5), numbers(1, -2), 1e-9) is None
    assert vectors.factor_between(numbers(1, 1), numbers(0, 0), 1e-9) is None


# Parts of 1, 0 and 2: the second one has no gradient.
PARTS = [numbers(1, 0, 1, 0, 2, 0), numbers(*[0] * 6), numbers(0, 1, 0, 1, 0, 3)]


def test_weights_of_parts_are_found():
    total = numbers(0.25, 2, 0.25, 2, 0.5, 6)
    weights = vectors.weights_of_parts(PARTS, total, 1e-9)
    torch.testing.assert_close(weights, numbers(0.25, 0, 2))


def test_other_total_has_no_weights():
    assert vectors.weights_of_parts(PARTS, numbers(1, 2, 3, 4, 5, 6), 1e-9) is None


def test_several_explanations_are_none():
    """Two parts alike, and three parts of a model with five numbers."""
    alike = [PARTS[0], 2 * PARTS[0]]
    assert vectors.weights_of_parts(alike, 3 * PARTS[0], 1e-9) is None
    short = [part[:5] for part in PARTS]
    assert vectors.weights_of_parts(short, short[0], 1e-9) is None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_have_no_weights(number):
    assert vectors.weights_of_parts(PARTS, number * PARTS[0], 1e-9) is None
    parts = [number * PARTS[0], PARTS[2]]
    assert vectors.weights_of_parts(parts, PARTS[0], 1e-9) is None


def test_weight_of_rounding_is_zero():
    total = PARTS[0] + 1e-12 * PARTS[2]
    weights = vectors.weights_of_parts(PARTS, total, 1e-5)
    assert weights.tolist()[1:] == [0, 0]


# --- which count the weights of parts are proportional to ---


class Counted(SplitEvidence):
    parts = ((0, 1, 2, 3), (4, 5))
    counts = (
        Count("rows", "", (1,) * 6),
        Count("labels", "batch", (1, 0, 0, 0, 1, 1)),
    )


def test_weights_are_named_by_first_count():
    evidence = Counted()
    rows, labels = evidence.counts
    assert evidence.counted_as(torch.tensor([4.0, 2.0])) is rows
    assert evidence.counted_as(torch.tensor([0.5, 1.0])) is labels
    assert evidence.counted_as(torch.tensor([1.0, 1.0])) is None
    assert evidence.counted_as(torch.tensor([0.0, 0.0])) is None


def test_evidence_without_answers_has_none():
    evidence = SplitEvidence()
    assert evidence.weights(()) is other_weights(evidence, ()) is None


# --- the order of causes, and what weights and growths mean ---


LABEL_COUNT = Count("labels", "batch", (1, 2))


class Answers(SplitEvidence):
    """SplitEvidence with the answers that a test gives: those of some kinds are yes."""

    parts = ((0,), (1,))
    counts = (LABEL_COUNT,)
    tolerance = 1e-4

    def __init__(self, answers, weights=None):
        self.answers = dict.fromkeys(CauseKind, False) | answers
        self.found = weights

    def questions(self):
        return {kind: lambda _, kind=kind: self.answers[kind] for kind in CauseKind}

    def weights(self, names):
        return self.found


def weights(computed, right):
    return Weights(torch.tensor(computed), torch.tensor(right))


STATE, COMPARED = CauseKind.STATE_BETWEEN_PARTS, CauseKind.ROWS_ARE_COMPARED
WITH_ONE, NOT_FINITE = CauseKind.WRONG_WITH_ONE_PART, CauseKind.NOT_FINITE
FACTOR, MEANS = CauseKind.CONSTANT_FACTOR, CauseKind.MEAN_OF_MEANS
ONCE = CauseKind.ONCE_PER_PART


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ({}, CauseKind.UNKNOWN),
        ({COMPARED: True}, COMPARED),
        ({COMPARED: True, MEANS: Finding(MEANS, count=LABEL_COUNT)}, MEANS),
        ({STATE: True, MEANS: Finding(MEANS, count=LABEL_COUNT)}, STATE),
        ({STATE: True, FACTOR: Finding(FACTOR, factor=4.0)}, FACTOR),
        ({FACTOR: Finding(CauseKind.RUNNING_SUM)}, CauseKind.RUNNING_SUM),
        ({FACTOR: None}, CauseKind.UNKNOWN),
        ({CauseKind.RANKS_DIFFER: True, FACTOR: True}, CauseKind.RANKS_DIFFER),
        ({WITH_ONE: True, FACTOR: True}, WITH_ONE),
        ({NOT_FINITE: True, WITH_ONE: True}, NOT_FINITE),
        ({ONCE: True, CauseKind.OTHER_WEIGHTS: True}, ONCE),
    ],
)
def test_first_fitting_cause_is_found(answers, kind):
    evidence = Answers(answers)
    finding, failures = first_finding(evidence, evidence.questions())
    assert finding.kind is kind
    assert not failures


@pytest.mark.parametrize(
    ("right", "kind"), [([0.7, 0.3], CauseKind.MEAN_OF_MEANS), ([0.5, 0.5], None)]
)
def test_weights_that_differ_are_a_cause(right, kind):
    finding = other_weights(Answers({}, weights([0.5, 0.5], right)), ["bias"])
    if kind is None:
        assert finding is None
    else:
        assert finding.kind is kind
        assert finding.names == ["bias"]


def test_question_that_nobody_answers_is_no_cause():
    assert first_finding(SplitEvidence(), {})[0].kind is CauseKind.UNKNOWN


def test_cause_that_cannot_be_tested_is_passed_over():
    def fails(_):
        raise ZeroDivisionError("no labels")

    evidence = Answers({COMPARED: True})
    finding, failures = first_finding(evidence, evidence.questions() | {STATE: fails})
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
    assert growth.is_of_a_term == is_found


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


def test_layers_that_use_statistics_of_a_part():
    """In training mode, or without running statistics."""
    training = nn.BatchNorm1d(2)
    without = nn.BatchNorm1d(2, track_running_stats=False).eval()
    assert uses_batch_statistics(training)
    assert uses_batch_statistics(without)
    assert not uses_batch_statistics(training.eval())
    assert not uses_batch_statistics(nn.LayerNorm(2))
