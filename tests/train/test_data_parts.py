"""Parts of a data set: their names, labels in columns, and what is held out."""

from __future__ import annotations

import os

import pytest
import torch

from scatterpar.train.command_line import UsageError
from scatterpar.train.data_parts import (
    TEST,
    TRAIN,
    VAL,
    Listing,
    Names,
    first_names,
    hold_out,
    labelled,
    make_parts,
    part_of,
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
    names = Names(listed)
    assert [names[row] for row in range(4)] == listed


@pytest.mark.draws
@pytest.mark.parametrize("val", [0.01, 0.1, 0.3, 0.9])
def test_split_tests_every_class_of_two(val):
    numbers = [60, 40, 4, 2, 1]
    labels = torch.arange(5).repeat_interleave(torch.tensor(numbers))
    is_held_out = hold_out(labels, val)
    tested = torch.bincount(labels[is_held_out], minlength=5).tolist()
    assert tested[4] == 0
    for number, size in zip(tested[:4], numbers, strict=False):
        assert 1 <= number < size
        assert abs(number - size * val) <= 1
    assert torch.equal(is_held_out, hold_out(labels, val))


CLASSES = ["a", "b", "c"]


def listing(class_names=CLASSES, **labels_of_parts):
    """Files with these labels, a letter each; a dot has none."""
    rows = []
    for part, labels in labels_of_parts.items():
        rows += [(part, "" if label == "." else label) for label in labels]
    names = [f"{row}.png" for row in range(len(rows))]
    return Listing(names, rows, class_names)


def sizes(pictures):
    return {name: len(part) for name, part in pictures.parts.items()}


def test_labels_become_numbers_of_classes():
    listed = listing(test="b.ax.B")
    pictures = labelled(listed)
    rows = pictures.parts[TEST]
    assert [pictures.sources[row] for row in rows] == ["0.png", "2.png", "5.png"]
    assert pictures.labels[rows].tolist() == [1, 0, 1]
    said = "2 without a label (test), 1 of classes that the training images lack (x)"
    assert unread_in_words(listed.unread) == said
    pictures = labelled(listing(["A", "a", "b"], train="aAbB"))
    assert pictures.labels.tolist() == [1, 0, 2, 2]


@pytest.mark.parametrize(
    ("part", "labels"), [(TRAIN, "x"), (TRAIN, ".."), (TEST, ".xy")]
)
def test_part_of_other_classes_is_refused(part, labels):
    words = f"no images to {part} of its classes a, b, c; not read: [12] "
    with pytest.raises(UsageError, match=words):
        make_parts(listing(**{TRAIN: "aabbcc"} | {part: labels}), None)


@pytest.mark.parametrize("labels", ["..", "xxx", "x."])  # as of competitions
def test_unlabelled_part_is_left_aside(labels):
    pictures = make_parts(listing(train="aabbcc", test=labels), 0.5)
    assert sizes(pictures) == {TRAIN: 3, TEST: 3}


def test_part_without_labels_is_not_tested():
    pictures = make_parts(listing(train="aabbcc", val="..", test="abc"), None)
    assert sizes(pictures) == {TRAIN: 6, TEST: 3}
    pictures = make_parts(listing(train="aabbcc", test="abc", val="cc."), None)
    assert list(sizes(pictures).items()) == [(TRAIN, 6), (VAL, 2), (TEST, 3)]
    assert pictures.labels[pictures.parts[VAL]].tolist() == [2, 2]
    assert pictures.notes == [
        "warning: not tested, as there is no picture for it: a, b",
        "not read: images or files 1 without a label (val)",
    ]
    pictures = make_parts(listing(train="abc", val="abc"), None)
    assert sizes(pictures) == {TRAIN: 3, TEST: 3}  # the only part that is tested


def test_part_held_out_divides_the_training_pictures():
    pictures = make_parts(listing(train="a.abbbb", extra="ab"), 0.5)
    rows = [*pictures.parts[TRAIN].tolist(), *pictures.parts[TEST].tolist()]
    assert sorted(rows) == [0, 2, 3, 4, 5, 6]
    said = "1 without a label (train), 2 in other parts (extra)"
    assert pictures.notes == [
        "warning: not tested, as there is no picture for it: c",
        f"not read: images or files {said}",
    ]


def test_other_parts_are_told_at_once():
    others = {f"fold{number}": "ab" for number in range(20, 32)}
    listed = listing(train="abc", **others, **{"": "a"})
    labelled(listed)
    (said,) = listed.unread
    assert said.startswith("in other parts (fold20, fold21, ")
    assert said.endswith(", and 3 more)")
    assert listed.unread[said] == 25
    listed = listing(train="abc", **{"": "ab", "extra": "a"})
    labelled(listed)
    assert unread_in_words(listed.unread) == "3 in other parts (extra, no name)"


def test_unreadable_files_are_not_compared(tmp_path):
    """The feed reports them."""
    names = [tmp_path / name for name in ("a", "b", "gone", "c", "d", "e")]
    for name in (names[0], names[3]):
        name.mkdir()  # no file, of some size
    for name in (names[1], names[4]):
        name.write_bytes(b"same")
    listed = listing(["a", "b", "c"], train="abc", test="abc")
    listed.sources = list(map(str, names))
    pictures = make_parts(listed, None)
    (note,) = pictures.notes
    assert note.startswith("warning: 1 of 3 pictures to test on are to train on, too")


def test_untested_class_is_told():
    pictures = make_parts(listing(train="aabccc"), 0.3)
    assert pictures.notes == ["warning: not tested, as there is no picture for it: b"]
    with pytest.raises(UsageError, match="it has images to test on"):
        make_parts(listing(train="aabccc", test="ab"), 0.3)
    with pytest.raises(UsageError, match="two classes are needed"):
        make_parts(listing(["a"], train="aabccc"), 0.3)


def test_untestable_set_tells_what_is_left_aside():
    with pytest.raises(
        UsageError, match=r"--val 0.1 .*; not read: 4 without a label \(val\)"
    ):
        make_parts(listing(["a", "b"], train="ab", val="...."), None)


def test_long_list_is_cut():
    assert first_names(["a", "b"]) == "a, b"
    assert first_names([str(number) for number in range(12)]).endswith(
        "8, 9, and 2 more"
    )
