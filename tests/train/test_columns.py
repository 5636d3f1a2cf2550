"""Columns of pictures and labels: which they are, and what labels become."""

from __future__ import annotations

import pytest

from scatterpar.train import columns as columns_module
from scatterpar.train.columns import (
    choose_column,
    columns_in_words,
)
from scatterpar.train.command_line import Options, UsageError


def class_names_of(labels, column):
    return columns_module.class_names_of([("train", label) for label in labels], column)


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
    options = Options(column_image=chosen)
    if column in columns:
        assert choose_column("image", columns, options) == column
        return
    with pytest.raises(UsageError, match=column):
        choose_column("image", columns, options)


def test_no_other_column_than_a_likely_one_is_chosen():
    options = Options(column_label="boxes")
    assert choose_column("label", ["label", "boxes"], options, []) == "boxes"
    with pytest.raises(UsageError, match="--column-label NAME, one of none"):
        choose_column("label", ["label"], Options(), [])


def test_labels_of_a_column_become_classes():
    assert class_names_of(["10", "9", "9", ""], "y") == ["9", "10"]
    with pytest.raises(UsageError, match="column id has 100 values for 100 images"):
        class_names_of([f"photo {number}" for number in range(100)], "id")


SEVERAL_CLASSES = [
    ["cat dog", "dog", "cat"],
    ["Effusion|Mass", "No Finding"],
    ["a;b", "c"],
    ["['cat', 'dog']", "['dog']"],
    ["b,a", "a", "b", "c"],
    ["a,b", "b,c", "c,a"],
]


@pytest.mark.parametrize("labels", SEVERAL_CLASSES)
def test_several_classes_of_one_image_are_refused(labels):
    with pytest.raises(UsageError, match="the column y has several classes for one im"):
        class_names_of(labels, "y")


ONE_CLASS = [
    ["great dane", "golden retriever", "dane"],
    ["tench, Tinca tinca", "crane"],
    ["maillot", "maillot, tank suit", "great dane, dog", "great dane"],
    ["T-shirt/top", "shirt"],
    ["['cat']", "['dog']"],
    ["black bear", "bear"],
]


@pytest.mark.parametrize("labels", ONE_CLASS)
def test_class_may_have_several_words(labels):
    assert class_names_of(labels, "y") == sorted(labels)


def test_columns_that_are_not_used_are_told():
    words = columns_in_words("image", ["label"], ["image", "label", "is_valid"])
    assert words.endswith(
        "from the column image, classes from label; not used: is_valid"
    )
    assert columns_in_words("a", ["b", "c"], ["a", "b", "c"]).endswith("m b, c")
