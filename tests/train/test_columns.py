"""Columns of pictures and labels: which they are, and what labels become."""

from __future__ import annotations

import pytest

from scatterpar.train.columns import (
    choose_column,
    class_names_of,
    columns_in_words,
    label_rows,
    labelled_rows,
)
from scatterpar.train.command_line import UsageError
from scatterpar.train.data_parts import TEST, TRAIN, Unused


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


SEVERAL_CLASSES = [
    ["cat dog", "dog", "cat"],
    ["Effusion|Mass", "No Finding"],
    ["a;b", "c"],
    ["['cat', 'dog']", "['dog']"],
    ["b,a", "a", "b", "c"],
]


@pytest.mark.parametrize("labels", SEVERAL_CLASSES)
def test_several_classes_of_one_image_are_refused(labels):
    with pytest.raises(UsageError, match="the column y has several classes for one im"):
        class_names_of(labels, "y")


ONE_CLASS = [
    ["great dane", "golden retriever", "dane"],
    ["tench, Tinca tinca", "crane"],
    ["T-shirt/top", "shirt"],
    ["['cat']", "['dog']"],
    ["black bear", "bear"],
]


@pytest.mark.parametrize("labels", ONE_CLASS)
def test_class_may_have_several_words(labels):
    assert class_names_of(labels, "y") == sorted(labels)


def test_classes_are_those_of_training_images():
    labels = {TRAIN: ["b", "a", None], TEST: ["a", "c", "b"]}
    unused = Unused()
    names, pairs = label_rows(labels, "y", unused)
    assert names == ["a", "b"]
    assert pairs == {TRAIN: [(0, 1), (1, 0)], TEST: [(0, 0), (2, 1)]}
    assert unused.counts.total() == 2
    assert label_rows(labels, "y", unused, ["c", "b", "a"])[1][TEST][1] == (1, 0)
    _, pairs = label_rows(labels | {TEST: [None, ""]}, "y", unused)
    assert list(pairs) == [TRAIN]
    for wrong, words in (({TEST: ["a"]}, "called train"), ({TRAIN: [""]}, "no y")):
        with pytest.raises(UsageError, match=words):
            label_rows(wrong, "y", unused)


def test_columns_that_are_not_used_are_told():
    words = columns_in_words("image", "label", ["image", "label", "is_valid"])
    assert words.endswith(
        "from the column image, classes from label; not used: is_valid"
    )
    assert columns_in_words("a", "b", ["a", "b"]).endswith("classes from b")
