"""Parts of a data set: their names, labels in columns, and what is held out."""

from __future__ import annotations

import os

import pytest
import torch

from scatterpar.train.command_line import UsageError
from scatterpar.train.parts import (
    TEST,
    TRAIN,
    VAL,
    Files,
    Unused,
    choose_column,
    class_names_of,
    first_names,
    labelled_rows,
    make_parts,
    part_of,
    split,
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
    files = Files([(name, label) for label, name in enumerate(listed)])
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


def files(*labels):
    return Files([(f"{row}.png", label) for row, label in enumerate(labels)])


def test_untested_class_is_told():
    pictures = {TRAIN: files(0, 0, 1, 2, 2, 2)}
    parts = make_parts(pictures, ["a", "b", "c"], Unused(), 0.3)
    assert parts.notes == ["warning: not tested, as there is no picture for it: b"]
    with pytest.raises(UsageError, match="it has images to test on"):
        make_parts(pictures | {TEST: files(0, 1)}, ["a", "b", "c"], Unused(), 0.3)
    with pytest.raises(UsageError, match="two classes are needed"):
        make_parts(pictures, ["a"], Unused(), 0.3)


@pytest.mark.parametrize(
    ("columns", "chosen", "column"),
    [
        (["id", "Image Path", "x"], None, "Image Path"),
        (["photo"], None, "photo"),
        (["image", "photo"], "photo", "photo"),
        (["image", "photo"], "foto", "foto: its columns are image, photo"),
        (["a", "b"], None, "which column has the images is not known"),
    ],
)
def test_column_by_option_name_or_alone(columns, chosen, column):
    usual = "image imagepath id"
    if column in columns:
        assert choose_column(columns, usual, "image", chosen) == column
        return
    with pytest.raises(UsageError, match=column):
        choose_column(columns, usual, "image", chosen)


def test_labels_of_a_column_become_classes():
    assert class_names_of(["10", "9", "9", "", None], "y") == ["9", "10"]
    assert class_names_of([True, False, float("nan")], "y") == ["False", "True"]
    with pytest.raises(UsageError, match="column id has 100 values for 100 images"):
        class_names_of([f"photo {number}" for number in range(100)], "id")
    unused = Unused()
    labels = ["b", None, "a", "other", ""]
    assert labelled_rows(labels, ["a", "b"], unused) == [(0, 1), (2, 0)]
    said = "2 without a label, 1 of classes that the training images lack (other)"
    assert str(unused) == said


def test_long_list_is_cut():
    assert first_names(["a", "b"]) == "a, b"
    assert first_names([str(number) for number in range(12)]).endswith(
        "8, 9, and 2 more"
    )
