"""Batches of a Trainer's step: how rows are dealt, and how their losses combine."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from scatterpar.integrations import step_batches
from scatterpar.integrations.step_batches import LABELS, ROWS, SHIFTED, SUM, Step

# Two batches: labels of 2 and 1 rows, of which 3 and 1 count; 2 and 1 after a shift.
FIRST = {"labels": torch.tensor([[4, 5, -100], [6, -100, -100]]), "text": ["a", "b"]}
SECOND = {"labels": torch.tensor([[-100, -100, 7]]), "text": ["c"]}
STEP = Step([FIRST, SECOND])


def test_step_entry_has_rows_of_all_batches():
    assert STEP["labels"].tolist() == [[4, 5, -100], [6, -100, -100], [-100, -100, 7]]
    assert STEP["text"] == ["a", "b", "c"]
    assert STEP[1] is SECOND
    assert dict(STEP)["text"] == STEP.get("text")
    assert "labels" in STEP


def test_entry_set_by_name_is_divided_by_rows():
    """A loader that told each batch its task raised a TypeError."""
    step = Step([dict(FIRST), dict(SECOND)])
    step["task"] = "a"
    step["weights"] = torch.arange(3)
    step["names"] = ["x", "y", "z"]
    assert [batch["task"] for batch in step] == ["a", "a"]
    assert [batch["weights"].tolist() for batch in step] == [[0, 1], [2]]
    assert [batch["names"] for batch in step] == [["x", "y"], ["z"]]
    step[1] = SECOND
    assert step[1] is SECOND


def test_step_is_no_mapping():
    """A training_step that took a column out got a TypeError of ``list``."""
    step = Step([dict(FIRST), dict(SECOND)])
    for name in ("pop('labels')", "update", "to"):
        with pytest.raises(
            AttributeError, match="the list of all its batches"
        ) as error:
            eval(f"step.{name}")
        assert name in str(error.value)
    assert not hasattr(step, "pin_memory")
    last = step[1]
    assert step.pop() is last
    assert len(step) == 1


def test_entry_missing_in_one_batch_left_out():
    step = Step([{"x": 1, "y": 2}, {"y": 2}])
    assert list(step.keys()) == ["y"]
    assert step.get("x", "nothing") == "nothing"
    assert "x" not in step


def test_entries_of_other_widths_are_there():
    step = Step([{"words": torch.ones(2, 3)}, {"words": torch.ones(2, 5)}])
    assert "words" in step


def test_batches_joined_as_rows_are():
    """Also what has another number of entries than the batch has rows."""
    batches = []
    for batch, images in ((FIRST, 3), (SECOND, 2)):
        batches.append(UserDict(batch, images=torch.ones(images, 2)))
    rows = step_batches.rows_of_batches(batches)
    whole = rows.collate(rows.entries)
    assert type(whole) is UserDict
    assert whole["text"] == ["a", "b", "c"]
    assert whole["images"].shape == (5, 2)
    assert rows.collate(rows.entries[1:])["text"] == ["c"]
    assert FIRST["text"] == ["a", "b"]


@pytest.mark.parametrize("second", [{"ids": torch.ones(1, 5)}, (torch.ones(1, 3),)])
def test_batches_of_other_widths_are_not_joined(second):
    first = (
        (torch.ones(2, 3),) if isinstance(second, tuple) else {"ids": torch.ones(2, 3)}
    )
    with pytest.raises(ValueError, match="batches cannot be joined"):
        step_batches.rows_of_batches([first, second])


def test_rows_dealt_in_order_last_smaller():
    assert step_batches.by_number(list, 2, "abcde") == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        (LABELS, [2, 1], [1]),
        (SHIFTED, [1, 0], [1]),
        (ROWS, [1, 1], [1]),
        (lambda batch: len(batch["text"]) * 10, [20], [10]),
    ],
)
def test_terms_of_rows_by_hand(how, first, second):
    assert step_batches.terms(how, FIRST).tolist() == first
    assert step_batches.terms(how, SECOND).tolist() == second


def test_shifted_labels_counted_unshifted():
    batch = {
        "shift_labels": torch.tensor([[1, 2, -100]]),
        "labels": FIRST["labels"][:1],
    }
    assert step_batches.terms(SHIFTED, batch).tolist() == [2]


def test_packed_labels_counted_per_batch():
    """As in packed sequences: five labels, two rows."""
    batch = {"ids": torch.ones(2, 4), "labels": torch.tensor([1, -100, 2, 3, -100])}
    assert step_batches.terms(LABELS, batch).tolist() == [3]
    assert step_batches.terms(ROWS, batch).tolist() == [2]


def test_engine_counts_terms():
    summed = step_batches.candidate(SUM, 7)
    assert (summed.reduction, summed.count, summed.entries) == (
        "sum",
        None,
        {"items": 7, "is_added": True},
    )
    by_labels = step_batches.candidate(LABELS, 7)
    assert float(by_labels.count({"batch": FIRST}, None)) == 3
    assert by_labels.entries == {"items": 7, "is_added": False}


def test_batch_with_most_lengths_tells_most():
    equal = {"labels": torch.ones(5, 2)}
    padded = {"labels": torch.tensor([[1, 2], [3, -100]])}
    assert step_batches.telling_batch(Step([equal, padded, equal])) is padded
