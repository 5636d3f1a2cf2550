"""Batches of a Trainer's step: how rows are dealt, and how their losses combine."""

from __future__ import annotations

import warnings

import pytest
import torch

from scatterpar.integrations import steps
from scatterpar.integrations.steps import LABELS, ROWS, SHIFTED, SUM, Combination, Step

# Two batches: labels of 2 and 1 rows, of which 3 and 1 count; 2 and 1 after a shift.
FIRST = {"labels": torch.tensor([[4, 5, -100], [6, -100, -100]]), "text": ["a", "b"]}
SECOND = {"labels": torch.tensor([[-100, -100, 7]]), "text": ["c"]}
STEP = Step([FIRST, SECOND])


def test_an_entry_of_a_step_has_the_rows_of_all_batches():
    assert STEP["labels"].tolist() == [[4, 5, -100], [6, -100, -100], [-100, -100, 7]]
    assert STEP["text"] == ["a", "b", "c"]
    assert STEP[1] is SECOND
    assert dict(STEP.items())["text"] == STEP.get("text") == list(STEP.values())[1]


def test_an_entry_that_one_batch_lacks_is_none_of_the_step():
    step = Step([{"x": 1, "y": 2}, {"y": 2}])
    assert list(step.keys()) == ["y"]
    assert step.get("x", "nothing") == "nothing"


def test_batches_of_other_widths_are_refused_with_their_shapes():
    step = Step([{"ids": torch.ones(2, 3)}, {"ids": torch.ones(1, 5)}])
    with pytest.raises(ValueError, match=r"\[\(2, 3\), \(1, 5\)\].*step\[0\]\['ids'\]"):
        step["ids"]


def test_rows_are_dealt_in_order_and_the_last_batch_may_be_smaller():
    assert steps.by_number(list, 2, "abcde") == [["a", "b"], ["c", "d"], ["e"]]


def test_rows_of_like_length_are_dealt_together():
    """Rows of 1, 4, 1 and 4 words, and at most four words a batch."""
    rows = [
        {"ids": [0] * length, "name": name}
        for name, length in zip("abcd", (1, 4, 1, 4), strict=True)
    ]

    def collate(part):
        return sorted(row["name"] for row in part)

    names = steps.by_cost(collate, "ids", 4, [torch.device("cpu")], rows)
    assert sorted(names) == [["a", "c"], ["b"], ["d"]]


def test_rows_without_a_length_are_refused_by_the_name_of_the_entry():
    with pytest.raises(ValueError, match=r"length of each row's 'ids', .* got 3"):
        steps.by_cost(list, "ids", 4, [torch.device("cpu")], [3])


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        (LABELS, [2, 1], [1]),
        (SHIFTED, [1, 0], [1]),
        (ROWS, [1, 1], [1]),
        (lambda batch: len(batch["text"]) * 10, [20], [10]),
    ],
)
def test_terms_of_rows_are_counted_by_hand(how, first, second):
    assert steps.terms(how, FIRST).tolist() == first
    assert steps.terms(how, SECOND).tolist() == second


def test_labels_that_are_shifted_already_are_counted_as_they_are():
    batch = {
        "shift_labels": torch.tensor([[1, 2, -100]]),
        "labels": FIRST["labels"][:1],
    }
    assert steps.terms(SHIFTED, batch).tolist() == [2]


def test_labels_of_other_rows_are_counted_for_the_batch():
    """As in packed sequences: five labels, two rows."""
    batch = {"ids": torch.ones(2, 4), "labels": torch.tensor([1, -100, 2, 3, -100])}
    assert steps.terms(LABELS, batch).tolist() == [3]
    assert steps.terms(ROWS, batch).tolist() == [2]


@pytest.mark.parametrize(
    ("how", "of_batches"),
    [(LABELS, [3 / 4, 1 / 4]), (ROWS, [2 / 3, 1 / 3]), (SUM, [1, 1])],
)
def test_weights_of_batches_are_their_part_of_all_terms(how, of_batches):
    assert steps.weights(how, STEP) == of_batches


def test_weights_of_one_batch_are_those_of_its_rows():
    assert steps.weights(LABELS, FIRST) == [2 / 3, 1 / 3]


def test_without_any_label_no_batch_has_weight():
    nothing = {"labels": torch.full((2, 3), -100)}
    assert steps.weights(LABELS, Step([nothing, nothing])) == [0, 0]


def test_the_engine_counts_what_the_weights_count():
    assert steps.options(SUM) == {"reduction": "sum"}
    count = steps.options(LABELS)["count"]
    assert float(count({"batch": FIRST}, None)) == 3


def combination(step, number, answers):
    """Asks which of labels and rows fits; ``answers`` by candidate."""
    asked = []

    def fit(how, _):
        asked.append(how)
        return answers.get(how)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        how = Combination([LABELS, ROWS]).of(step, number, fit)
    return how, asked, [str(warning.message) for warning in told]


@pytest.mark.parametrize("of_labels", [False, None])
def test_a_candidate_that_fits_is_taken(of_labels):
    answers = {LABELS: of_labels, ROWS: True}
    assert combination(STEP, 1, answers) == (ROWS, [LABELS, ROWS], [])


def test_without_an_answer_the_most_likely_is_taken_and_told_once():
    how, _, (words,) = combination(STEP, 1, {})
    assert how == LABELS
    assert "weighted by labels, or else by rows" in words


def test_nothing_is_taken_if_all_are_refuted():
    assert combination(STEP, 1, {LABELS: False, ROWS: False})[0] is None


def test_a_step_whose_candidates_agree_is_looked_at_in_steps_1_2_4_8():
    batch = {"labels": torch.tensor([[1], [2]]), "text": ["a", "b"]}
    alike = Step([batch, batch])
    looked_at = [number for number in range(1, 10) if combination(alike, number, {})[1]]
    assert looked_at == [1, 2, 4, 8]
