"""Folders of pictures: which are parts of a data set, which are classes, what is left
out.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest
from harness.pictures import CLASSES, write_folder
from PIL import Image

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data_parts import make_parts
from scatterpar.train.folders import files_below
from scatterpar.train.folders import read_folders as read

LISTED = sorted(CLASSES)


def read_folders(path, val=None, **options):
    return make_parts(read(path, Options(**options)), val)


def labels_of(pictures, part):
    return pictures.labels[pictures.parts[part]].tolist()


def sizes(folders):
    return {name: len(part) for name, part in folders.parts.items()}


def make(folder, *names):
    """Write a small picture, or an empty file, of each name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".jpg", ".png"):
            Image.new("L", (2, 2)).save(path)
        else:
            path.touch()
    return folder


def parts(folder, *names, classes=("cat", "dog"), pictures=2):
    """Write folders of classes into each of these parts."""
    for name in names:
        for label in classes:
            make(
                folder, *(f"{name}/{label}/{number}.png" for number in range(pictures))
            )
    return folder


def refused(words, folder, val=None, **options):
    with pytest.raises(UsageError, match=words) as caught:
        read_folders(folder, val, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("train", "test"),
    [
        *[("train", "test"), ("train", "val"), ("Train", "Test"), ("TRAIN", "VAL")],
        *[("train", "valid"), ("training", "validation"), ("Training", "Testing")],
        *[("train", "dev"), ("train", "eval"), ("training", "evaluation")],
        *[("training_set", "test_set"), ("seg_train", "seg_test")],
        *[("train_images", "val_images"), ("TrainSet", "ValSet")],
        *[("training", "val"), ("Train images", "Test images")],
        *[("train2017", "val2017"), ("trainset", "testset"), ("my-train", "my-dev")],
    ],
)
def test_part_names_ignore_case(tmp_path, train, test):
    parts(tmp_path, train, pictures=3)
    parts(tmp_path, test, pictures=2)
    folders = read_folders(tmp_path)
    assert folders.class_names == ("cat", "dog")
    assert sizes(folders) == {"train": 6, "test": 4}
    assert names(folders, "train")[0] == str(tmp_path / train / "cat" / "0.png")
    assert labels_of(folders, "train")[0] == 0
    assert "not read" not in str(folders.notes)


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        *[("train", "val", "Test"), ("Train", "val", "Test")],
        *[("TRAIN", "val", "TEST"), ("training", "validation", "Testing")],
        *[("Training", "Valid", "test"), ("TrainSet", "DEV", "EVAL")],
    ],
)
def test_val_tested_each_epoch_test_at_end(tmp_path, train, val, test):
    parts(tmp_path, train, pictures=5)
    parts(tmp_path, val, pictures=3)
    parts(tmp_path, test, pictures=2)
    folders = read_folders(tmp_path)
    assert sizes(folders) == {"train": 10, "val": 6, "test": 4}
    assert f"{os.sep}{val}{os.sep}" in names(folders, "val")[0]


WHICH = "--train-folder NAME and --val-folder NAME say which is which"


@pytest.mark.pictures
def test_unknown_layout_refused(tmp_path):
    refused("no images to test on: --val 0.1", parts(tmp_path / "a", "."))
    refused("no images to test on: --val 0.1", parts(tmp_path / "b", "train"))
    unclear = [("train", "Train", "val"), ("train", "val", "valid"), ("learn", "test")]
    unclear += [("training", "validation", "val"), ("train", "bus")]
    for number, names in enumerate(unclear):
        folder = parts(tmp_path / f"c{number}", *names)
        listed = ", ".join(f"{name}/" for name in sorted(names))
        for val in (None, 0.1):
            refused(f"its folders {listed} has .* is not clear: {WHICH}", folder, val)
    deeper = parts(tmp_path / "f" / "photos", "train", "test")
    refused(r"two at least, and has \['photos'\]; make a folder for", deeper.parent)
    flat = make(tmp_path / "g", "train/1.png", "test/1.png")
    refused("test/, train/ are in no folders of classes", flat, 0.1)
    twice = make(tmp_path / "i", "Train/1.png", "train/1.png", "other/1.png")
    refused("other/, train/ are in no folders of classes", twice, 0.1)
    refused(
        "it has images to test on; leave out --val",
        parts(tmp_path / "h", "train", "test"),
        0.1,
    )


@pytest.mark.pictures
@pytest.mark.parametrize("names", [("day1", "day2"), ("entrenar", "prueba", "otro")])
def test_unnamed_parts_are_no_classes(tmp_path, names):
    """Folders with the same folders are refused, and options tell them apart."""
    parts(tmp_path, *names, pictures=3)
    words = rf"{names[0]}/ and .* the same folders \(cat, dog\).*: {WHICH}"
    refused(words, tmp_path, 0.1)
    folders = read_folders(tmp_path, train_folder=names[0], val_folder=names[1])
    assert folders.class_names == ("cat", "dog")
    assert (len(folders.parts["train"]), len(folders.parts["test"])) == (6, 6)
    all_classes = read_folders(tmp_path, 0.2, train_folder=".")
    assert all_classes.class_names == tuple(sorted(names))
    refused("there is no folder .*absent", tmp_path, train_folder="absent")
    refused("--train-folder is missing", tmp_path, val_folder=names[0])


@pytest.mark.pictures
@pytest.mark.parametrize(
    "names",
    [
        ("bus", "train"),
        ("bus", "crash test"),
        ("fast_train", "slow_train"),
        ("bus", "test tube", "train station"),
    ],
)
def test_class_may_be_called_like_a_part(tmp_path, names):
    make(tmp_path, *(f"{name}/{n}.png" for name in names for n in range(4)))
    folders = read_folders(tmp_path, 0.25)
    assert folders.class_names == tuple(sorted(names))
    assert (len(folders.parts["train"]), len(folders.parts["test"])) == (
        3 * len(names),
        len(names),
    )


@pytest.mark.pictures
@pytest.mark.parametrize(
    "unlabelled",
    ["test/1.png", "Test/unknown/1.png", "val/1.png", "val/images/1.png"],
)
def test_unlabelled_folder_left_aside(tmp_path, unlabelled):
    parts(tmp_path, "train", pictures=4)
    make(tmp_path, unlabelled)
    part, *folders = unlabelled.lower().split("/")[:-1]
    words = f"1 without a label ({part})"
    if folders:
        words = f"1 of classes that the training images lack ({folders[0]})"
    refused(rf"no images to test on: --val 0.1.* {re.escape(words)}", tmp_path)
    folders = read_folders(tmp_path, 0.25)
    assert (len(folders.parts["train"]), len(folders.parts["test"])) == (6, 2)
    assert words in folders.notes[-1]
    name = unlabelled.partition("/")[0]
    labelled = "val" if name.lower() == "test" else "test"
    parts(tmp_path, labelled)
    assert len(read_folders(tmp_path).parts["test"]) == 4


@pytest.mark.pictures
def test_part_with_a_single_class_is_tested(tmp_path):
    parts(tmp_path, "train")
    parts(tmp_path, "test", classes=("Cat",), pictures=3)
    folders = read_folders(tmp_path)
    assert labels_of(folders, "test") == [0, 0, 0]
    assert "no picture for it: dog" in folders.notes[0]


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("train", "test"), [("seg_train", "seg_test"), ("train", "val"), ("Train", "TEST")]
)
def test_folder_of_a_part_in_itself_is_read(tmp_path, train, test):
    """As an archive is unpacked into a folder of its name."""
    parts(tmp_path, f"{train}/{train}", pictures=3)
    parts(tmp_path, f"{test}/{test}")
    make(tmp_path, "seg_pred/seg_pred/1.png")
    folders = read_folders(tmp_path)
    assert (len(folders.parts["train"]), len(folders.parts["test"])) == (6, 4)
    assert "not read: images or files 1 in other folders (seg_pred/)" in folders.notes


@pytest.mark.pictures
def test_folders_in_a_class_are_told(tmp_path):
    parts(tmp_path, "cat", classes=("siamese", "persian"))
    parts(tmp_path, "dog", classes=("images",))
    folders = read_folders(tmp_path, 0.5)
    assert folders.class_names == ("cat", "dog")
    told = "the folders in a class are one class: cat"
    assert told in folders.notes


@pytest.mark.pictures
def test_pictures_without_classes_refused(tmp_path):
    make(tmp_path, "1.png", "2.jpg")
    refused(r"two at least, and has \[\]; make a folder for", tmp_path)
    make(tmp_path, "labels.csv")
    refused(f"pass --data {tmp_path / 'labels.csv'}", tmp_path, 0.1)


@pytest.mark.pictures
def test_pictures_to_train_and_to_test_on_are_told(tmp_path):
    """Copies under any name, in folders that are parts, or of one class."""
    place = parts(tmp_path / "a", "train", "test", pictures=1)
    files = [*place.rglob("*.png")]
    for number, file in enumerate(sorted(files)):
        Image.new("L", (2, 2), number).save(file)
    (place / "test" / "cat" / "lost.png").symlink_to("nowhere")
    assert read_folders(place).notes == []
    copied = place / "test" / "dog" / "copy.png"
    copied.write_bytes((place / "train" / "cat" / "0.png").read_bytes())
    assert "1 of 4 pictures to test on are to train on, too" in str(
        read_folders(place).notes
    )
    twice = read_folders(place, train_folder="train", val_folder="train")
    assert "2 of 2 pictures to test on are to train on, too" in str(twice.notes)


@pytest.mark.pictures
def test_missing_class_refused_in_train_told_in_val(tmp_path):
    parts(tmp_path, "train", "test")
    (tmp_path / "train" / "hat").mkdir()
    refused(r"train lacks pictures of hat: it is searched .*\.jpg, ", tmp_path)
    make(tmp_path, "train/hat/1.png", "test/hat/1.gif")
    assert "no picture for it: hat" in read_folders(tmp_path).notes[0]
    parts(tmp_path, "val", classes=("other", "names"))
    words = "no images to val of its classes cat, dog, hat; .*lack .names., .*other"
    refused(words, tmp_path)


@pytest.mark.pictures
def test_class_names_ignore_case_in_val(tmp_path):
    parts(tmp_path, "train")
    parts(tmp_path, "val", classes=("Cat", "DOG"))
    folders = read_folders(tmp_path)
    assert labels_of(folders, "test") == [0, 0, 1, 1]


@pytest.mark.pictures
def test_unread_files_are_counted(tmp_path):
    parts(tmp_path, "train", "test", "raw")
    make(
        tmp_path,
        "train/cat/a.gif",
        "train/cat/b.TXT",
        "train/dog/deep/c",
        "test/cat/x.heic",
    )
    make(tmp_path, "train/cat/.DS_Store", "train/cat/._1.png", "train/.cache/1.png")
    make(tmp_path, "train/labels.csv", "train/1.png")
    make(tmp_path, "test/hat/1.png", "test/hat/2.png", "train/__MACOSX/cat/1.png")
    folders = read_folders(tmp_path)
    assert folders.class_names == ("cat", "dog")
    assert (len(folders.parts["train"]), len(folders.parts["test"])) == (4, 4)
    said = folders.notes[-1]
    for words in (
        "1 with other endings (.TXT)",
        "1 with other endings (none)",
        "2 hidden",
        "1 without a label (train)",
        "2 of classes that the training images lack (hat)",
        "4 in other folders (raw/)",
    ):
        assert words in said


@pytest.mark.pictures
def test_upper_case_and_deep_files_read(tmp_path):
    parts(tmp_path, "train", "test")
    make(tmp_path, "train/cat/B.JPG", "train/cat/deep/er/1.Png", "train/cat/ä ö.png")
    assert len(read_folders(tmp_path, None).parts["train"]) == 7


def test_link_to_parent_not_followed(tmp_path):
    make(tmp_path, "cat/1.png", "cat/deep/2.png", "far/3.png")
    (tmp_path / "cat" / "deep" / "up").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "side").symlink_to(tmp_path / "far")
    names = [
        os.path.relpath(name, tmp_path)
        for name in files_below(tmp_path / "cat", Counter())
    ]
    assert names == ["cat/1.png", "cat/deep/2.png", "cat/side/3.png"]


@pytest.mark.pictures
def test_unsplit_classes_split_by_val(tmp_path):
    write_folder(tmp_path, train=20, test=1)
    refused("has too few pictures", tmp_path / "test", 0.1)
    place = tmp_path / "train"
    folders, again = (read_folders(place, 0.1, train_folder=".") for _ in range(2))
    assert names(folders, "train") == names(again, "train")
    assert names(folders, "test") == names(again, "test")
    listed = sorted(map(str, tmp_path.glob("train/*/*.png")))
    assert sorted([*names(folders, "train"), *names(folders, "test")]) == listed
    assert labels_of(folders, "test") == [0, 0, 1, 1, 2, 2]


def names(pictures, part):
    return [pictures.sources[row] for row in pictures.parts[part]]
