"""Parts of a data set: their names, labels in columns, and what is held out."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from scatterpar.train.command_line import UsageError
from scatterpar.train.data_parts import (
    TEST,
    TRAIN,
    VAL,
    ListedPictures,
    Names,
    Pictures,
    first_names,
    labelled,
    make_parts,
    part_of,
    split,
    unread_in_words,
)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *[("Training", TRAIN), ("train-00000", TRAIN), ("trainval", TRAIN)],
        *[("valid", VAL), ("DevSet", VAL), ("seg_test", TEST), ("testimages", TEST)],
        *[("cat", None), ("trains", None), ("contest", None), ("train_test", None)],
    ],
)
def test_part_is_a_word_of_the_name(name, part):
    assert part_of(name) == part


def test_any_file_name_is_kept():
    listed = ["a/ü x.jpg", os.fsdecode(b"b/\xff.png"), "c.jpg", "n01/n01_17.JPEG"]
    files = Pictures(Names(listed), torch.arange(4))
    assert [files[row] for row in range(4)] == [
        (name, row) for row, name in enumerate(listed)
    ]
    assert files.select(torch.tensor([3, 1]))[1] == (listed[1], 1)


@pytest.mark.draws
@pytest.mark.parametrize("val", [0.01, 0.1, 0.3, 0.9])
def test_split_tests_every_class_of_two(val):
    numbers = [60, 40, 4, 2, 1]
    labels = torch.arange(5).repeat_interleave(torch.tensor(numbers))
    held_in, held_out = split(labels, val)
    assert sorted([*held_in.tolist(), *held_out.tolist()]) == list(range(107))
    tested = torch.bincount(labels[held_out], minlength=5).tolist()
    assert tested[4] == 0
    for number, size in zip(tested[:4], numbers, strict=False):
        assert 1 <= number < size
        assert abs(number - size * val) <= 1
    assert torch.equal(held_out, split(labels, val)[1])


CLASSES = ["a", "b", "c"]


def rows(labels):
    """Files with these labels, a letter each; a dot has none."""
    labels = ["" if label == "." else label for label in labels]
    return ListedPictures(Names([f"{row}.png" for row in range(len(labels))]), labels)


def sizes(parts):
    return {name: len(part) for name, part in parts.parts.items()}


def numbers(pictures):
    return [pictures[row] for row in range(len(pictures))]


def test_labels_become_numbers_of_classes():
    unread = Counter()
    pictures = labelled(TEST, rows("b.ax.B"), CLASSES, unread)
    assert numbers(pictures) == [("0.png", 1), ("2.png", 0), ("5.png", 1)]
    said = "2 without a label (test), 1 of classes that the training images lack (x)"
    assert unread_in_words(unread) == said
    for labels in ("..", "xxx"):  # as of competitions
        assert not len(labelled(TEST, rows(labels), CLASSES, unread))
    for part, labels in ((TEST, "xy"), (TRAIN, "x"), (TRAIN, "..")):
        words = f"no images to {part} of its classes a, b, c; not read: .* without a l"
        with pytest.raises(UsageError, match=words):
            labelled(part, rows(labels), CLASSES, unread)
    cases = labelled(TRAIN, rows("aAbB"), ["A", "a", "b"], unread)
    assert cases.labels.tolist() == [1, 0, 2, 2]


def test_part_without_labels_is_not_tested():
    listed = {TRAIN: rows("aabbcc"), VAL: rows(".."), TEST: rows("abc")}
    parts = make_parts(listed, CLASSES, Counter(), None)
    assert sizes(parts) == {TRAIN: 6, TEST: 3}
    parts = make_parts(listed | {VAL: rows("cc.")}, CLASSES, Counter(), None)
    assert sizes(parts) == {TRAIN: 6, VAL: 2, TEST: 3}
    assert parts.parts[VAL].labels.tolist() == [2, 2]
    assert parts.notes == [
        "warning: not tested, as there is no picture for it: a, b",
        "not read: images or files 1 without a label (val)",
    ]
    parts = make_parts({TRAIN: rows("abc"), VAL: rows("abc")}, CLASSES, Counter(), None)
    assert sizes(parts) == {TRAIN: 3, TEST: 3}  # the only part that is tested


def test_untested_class_is_told():
    listed = {TRAIN: rows("aabccc")}
    parts = make_parts(listed, CLASSES, Counter(), 0.3)
    assert parts.notes == ["warning: not tested, as there is no picture for it: b"]
    with pytest.raises(UsageError, match="it has images to test on"):
        make_parts(listed | {TEST: rows("ab")}, CLASSES, Counter(), 0.3)
    with pytest.raises(UsageError, match="two classes are needed"):
        make_parts(listed, ["a"], Counter(), 0.3)


def test_untestable_set_tells_what_is_left_aside():
    unread = Counter()
    unread["without a label (val/)"] = 4
    with pytest.raises(
        UsageError, match=r"--val 0.1 .*; not read: 4 without a label \(val/\)"
    ):
        make_parts({TRAIN: rows("ab")}, ["a", "b"], unread, None)


def test_long_list_is_cut():
    assert first_names(["a", "b"]) == "a, b"
    assert first_names([str(number) for number in range(12)]).endswith(
        "8, 9, and 2 more"
    )
