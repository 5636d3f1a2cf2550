"""Folders of pictures: which of them is for what, and the files of each class.

photos/Training/cat/1.jpg        photos/cat/1.jpg      with --val 0.1
photos/valid/cat/2.jpg           photos/dog/2.jpg
photos/test/cat/3.jpg
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scatterpar.train.libraries import library
from scatterpar.train.options import UsageError

TRAIN = "train"
VAL = "val"
TEST = "test"
# As in Hugging Face's datasets, data_files.SPLIT_KEYWORDS.
_PART_NAMES = {
    TRAIN: ("train", "training"),
    VAL: ("val", "valid", "validation", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
HAS_TESTS = "it has images to test on; leave out --val"
_NO_SPLIT = (
    "class folders, no split: --val 0.1 tests on a tenth of each class; or make train/ "
    "and test/ (or val/) with the classes in each"
)
_MAC_COPY = "__MACOSX"  # a folder that macOS adds to its archives
_SHOWN_NAMES = 10
# Reasons for which files are not read.
_HIDDEN = "hidden"
_OTHER_ENDINGS = "with other endings"
_NO_CLASS = "outside of the folders of classes"
_UNKNOWN_CLASS = "of classes that the training images lack"
_OTHER_FOLDERS = "in other folders"

Pairs = list[tuple[str, int]]  # names of files and their labels


class Files:
    """Names of files, and their labels: two tensors, which worker processes share."""

    def __init__(self, pairs: Pairs) -> None:
        encoded = [os.fsencode(name) for name, _ in pairs]
        width = max(map(len, encoded))
        padded = bytearray(b"".join(name.ljust(width, b"\0") for name in encoded))
        letters = torch.frombuffer(padded, dtype=torch.uint8)
        self._names = letters.view(len(encoded), width)
        self.labels = torch.tensor([label for _, label in pairs], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[str, int]:
        letters = bytes(self._names[row].tolist())
        return os.fsdecode(letters.rstrip(b"\0")), int(self.labels[row])


@dataclass
class Unused:
    """How many files are not read, by reason, with their endings or folders."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, set[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str = "") -> None:
        """Count a file that is not read."""
        self.counts[reason] += 1
        if name:
            self.names.setdefault(reason, set()).add(name)

    def __str__(self) -> str:
        reasons = []
        for reason, number in self.counts.items():
            text = f"{number:,} {reason}"
            if reason in self.names:
                text += f" ({first_names(sorted(self.names[reason]))})"
            reasons.append(text)
        return ", ".join(reasons)


def first_names(names: Sequence[str], most: int = _SHOWN_NAMES) -> str:
    """Return a list of names as text: the first ones, and how many follow."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", and {len(names) - most:,} more"
    return text


@dataclass
class Folders:
    """The files of a data set, by part, and its classes.

    Attributes:
        train: the files to train on.
        test: the files to test on after each epoch.
        final: the files to test on once, at the end, or None.
        class_names: the names of the classes, sorted; a label is the place of a name.
        unused: the files that are not read.
    """

    train: Files
    test: Files
    final: Files | None
    class_names: list[str]
    unused: Unused


def read_folders(path: Path, val: float | None) -> Folders:
    """Find the files of a data set in the folders of `path`. With `val` there is no
    split yet, and that part of each class is for testing.
    """
    parts = _find_parts(path)
    has_tests = len(parts) > 1
    if has_tests and val is not None:
        raise UsageError(HAS_TESTS)
    if not has_tests and val is None:
        raise UsageError(_NO_SPLIT + _only_folder(path))
    unused = Unused()
    train = parts.get(TRAIN, path)
    class_names = [folder.name for folder in visible_folders(train)]
    if len(class_names) < 2:
        raise UsageError(
            f"{train} needs a folder for each class, two at least; it has "
            f"{class_names}{_only_folder(train)}"
        )
    pairs = _pairs_of_part(train, class_names, unused)
    if val is not None:
        held_in, held_out = split(Files(pairs), val)
        return Folders(held_in, held_out, None, class_names, unused)
    for folder in visible_folders(path):
        if folder not in parts.values():
            for _ in files_below(folder, unused):
                unused.add(_OTHER_FOLDERS, f"{folder.name}/")
    files = dict[str, Files]()
    for part in (VAL, TEST):
        if part in parts:
            files[part] = Files(_pairs_of_part(parts[part], class_names, unused))
    first = files.get(VAL) or files[TEST]
    final = files.get(TEST) if VAL in files else None
    return Folders(Files(pairs), first, final, class_names, unused)


def _find_parts(path: Path) -> dict[str, Path]:
    """Return the folders of `path` that are parts of a data set, in upper or lower
    case. There are none if the folders of `path` are classes.
    """
    parts = dict[str, Path]()
    for folder in visible_folders(path):
        for part, names in _PART_NAMES.items():
            if folder.name.lower() in names:
                if part in parts:
                    names_of_both = f"{parts[part].name}/ and {folder.name}/"
                    raise UsageError(
                        f"{names_of_both} are both for {part}; rename one of them"
                    )
                parts[part] = folder
    if TRAIN not in parts:
        for folder in parts.values():
            if len(visible_folders(folder)) > 1:
                folder_names = [entry.name for entry in visible_folders(path)]
                raise UsageError(
                    f"it has {folder.name}/, but no train/ or training/; its folders "
                    f"are {folder_names}"
                )
        return {}
    if len(parts) == 1 and not visible_folders(parts[TRAIN]):
        return {}  # the class of trains, beside other classes
    return parts


def _only_folder(path: Path) -> str:
    """Return a hint if the folders of classes are one level deeper."""
    folders = visible_folders(path)
    if len(folders) == 1 and visible_folders(folders[0]):
        return f"; did you mean {folders[0]}?"
    return ""


def visible_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    folders = []
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not _is_hidden(entry.name):
            folders.append(entry)
    return folders


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _MAC_COPY


def _pairs_of_part(folder: Path, class_names: Sequence[str], unused: Unused) -> Pairs:
    """Find the pictures of a part, and count its files that are not read."""
    pairs = Pairs()
    empty = []
    for label, class_name in enumerate(class_names):
        names = list(find_pictures(folder / class_name, unused))
        pairs += [(name, label) for name in names]
        if not names:
            empty.append(class_name)
    if empty:
        raise UsageError(
            f"{folder} lacks pictures of {first_names(empty)}; it is searched for "
            f"files that end in {', '.join(endings())}"
        )
    for entry in sorted(folder.iterdir()):
        if _is_hidden(entry.name):
            unused.add(_HIDDEN)
        elif entry.is_file():
            unused.add(_NO_CLASS)
        elif entry.name not in class_names:
            for _ in files_below(entry, unused):
                unused.add(_UNKNOWN_CLASS, entry.name)
    return pairs


def endings() -> tuple[str, ...]:
    """Return the endings of files that are read: torchvision's."""
    extensions: tuple[str, ...] = library("torchvision.datasets.folder").IMG_EXTENSIONS
    return extensions


def find_pictures(folder: Path, unused: Unused) -> Iterator[str]:
    """Yield the pictures in a folder, at any depth, sorted. Count other files."""
    extensions = endings()
    for name in files_below(folder, unused):
        if name.lower().endswith(extensions):
            yield name
        else:
            unused.add(_OTHER_ENDINGS, os.path.splitext(name)[1] or "none")


def files_below(folder: Path, unused: Unused) -> Iterator[str]:
    """Yield the files in a folder, at any depth and sorted, and count hidden ones."""
    places = list[tuple[str, list[str]]]()
    for place, folders, names in os.walk(folder, followlinks=True):
        places.append((place, names))
        for name in list(folders):
            if _is_hidden(name) or _leads_up(os.path.join(place, name)):
                folders.remove(name)
    for place, names in sorted(places):
        for name in sorted(names):
            if _is_hidden(name):
                unused.add(_HIDDEN)
            else:
                yield os.path.join(place, name)


def _leads_up(folder: str) -> bool:
    """Whether a folder is a link to one that contains it."""
    target = os.path.realpath(folder)
    parent = os.path.realpath(os.path.dirname(folder))
    return os.path.commonpath([target, parent]) == target


def split(files: Files, val: float) -> tuple[Files, Files]:
    """Hold out every so many files of each class, whose files are shuffled in the same
    way in every run. Returns the files to train on, and those to test on.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(files), generator=generator)
    rows = rows[files.labels[rows].argsort(stable=True)]
    numbers = torch.arange(len(files) + 1, dtype=torch.float64)
    tenths = (numbers * val + 1e-9).long()  # 1e-9: products that rounding made smaller
    is_test = tenths.diff() > 0
    if not is_test.any():
        raise UsageError(f"it has too few pictures ({len(files)}) for --val {val}")
    held_in = rows[~is_test].sort().values.tolist()
    held_out = rows[is_test].sort().values.tolist()
    return (
        Files([files[row] for row in held_in]),
        Files([files[row] for row in held_out]),
    )
