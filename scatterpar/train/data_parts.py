"""The parts of a data set, to train and to test on: their names, files and labels, and
a part that is held out of the training images.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scatterpar.train.command_line import UsageError

TRAIN = "train"
VAL = "val"
TEST = "test"
FINAL = "final"  # the part that is tested once, at the end, if there is one
# As in Hugging Face's datasets, data_files.SPLIT_KEYWORDS, and PASCAL VOC's trainval.
_PART_NAMES = {
    TRAIN: "train training trainval",
    VAL: "val valid validation dev",
    TEST: "test testing eval evaluation",
}
# Ends of a word, as in trainset: the name of the part comes before them.
_ENDS_OF_WORDS = re.compile("(set|data|images|imgs|pictures|photos)$")
UNLABELLED = "without a label"
UNKNOWN_CLASS = "of classes that the training images lack"
_NO_TESTS = (
    "there are no images to test on: --val 0.1 tests on a tenth of each class; or make "
    "folders train/ and test/ (or val/) with the classes in each"
)
_SHOWN_NAMES = 10


def part_of(name: str) -> str | None:
    """Return the part that a folder or split is for, by a word of its name.

    >>> [part_of(name) for name in ("Training", "seg_test", "ValSet", "val2017", "cat")]
    ['train', 'test', 'val', 'val', None]
    """
    separated = re.sub("([a-z])([A-Z])", r"\1 \2", name).lower()
    parts = set()
    for word in re.findall("[a-z]+", separated):
        stem = _ENDS_OF_WORDS.sub("", word)
        for part, names in _PART_NAMES.items():
            if stem in names.split():
                parts.add(part)
    return parts.pop() if len(parts) == 1 else None


def is_part_name(name: str) -> bool:
    """Whether the name is that of a part, and no more, in upper or lower case."""
    return any(name.lower() in names.split() for names in _PART_NAMES.values())


class Files:
    """Names of files, and their labels: two tensors, which worker processes share."""

    def __init__(self, pairs: Sequence[tuple[str, int]]) -> None:
        # NumPy pads shorter names with zeros.
        names = np.array([os.fsencode(name) for name, _ in pairs])
        letters = names.view(np.uint8).reshape(len(names), -1)
        self._names = torch.from_numpy(letters)
        # int32 is enough for classes, and half of the memory of a long list.
        self.labels = torch.tensor([label for _, label in pairs], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[str, int]:
        letters = bytes(self._names[row].tolist())
        return os.fsdecode(letters.rstrip(b"\0")), int(self.labels[row])

    def select(self, rows: Tensor) -> Files:
        """Return these files only."""
        return Files([self[row] for row in rows.tolist()])


@dataclass
class Unused:
    """How many files are not read, by reason, with their endings or folders."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, set[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str = "", number: int = 1) -> None:
        """Count files that are not read."""
        self.counts[reason] += number
        if name:
            self.names.setdefault(reason, set()).add(name)

    def __str__(self) -> str:
        reasons = []
        for reason, number in (+self.counts).items():
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
class DataParts:
    """The pictures of a data set, by part, and its classes.

    Attributes:
        train: the pictures to train on, which have ``labels`` and ``select``, as
            `Files` have.
        test: the pictures to test on after each epoch.
        final: the pictures to test on once, at the end, or None.
        class_names: the names of the classes; a label is the place of a name.
        unused: the files that are not read.
        notes: what else a reader of the results has to know.
    """

    train: Any
    test: Any
    final: Any
    class_names: Sequence[str]
    unused: Unused
    notes: list[str] = field(default_factory=list)


def make_parts(
    pictures: Mapping[str, Any],
    class_names: Sequence[str],
    unused: Unused,
    val: float | None,
) -> DataParts:
    """Choose what is tested when, and hold out the part `val` of the training pictures
    if there are none to test on.

    Args:
        pictures: the labelled pictures by part; empty parts are left out.
        class_names: the names of the classes.
        unused: the files that are not read.
        val: the part of each class to hold out.
    """
    if len(class_names) < 2:
        raise UsageError(f"two classes are needed, and it has {list(class_names)}")
    train = pictures[TRAIN]
    notes = []
    if len(pictures) == 1:
        if val is None:
            left_aside = f" (not read: {unused})" if str(unused) else ""
            raise UsageError(f"{_NO_TESTS}{left_aside}")
        held_in, held_out = split(train.labels, val)
        first = train.select(held_out)
        train = train.select(held_in)
        final = None
    else:
        if val is not None:
            raise UsageError("it has images to test on; leave out --val")
        first = pictures.get(VAL) or pictures[TEST]
        final = pictures[TEST] if VAL in pictures and TEST in pictures else None
    for part in (first, final):
        if part is not None:
            notes += _untested_classes(part, class_names)
    return DataParts(train, first, final, class_names, unused, notes)


def _untested_classes(part: Any, class_names: Sequence[str]) -> list[str]:
    """Return a line that names the classes without a picture to test on."""
    labels = getattr(part, "labels", None)
    if labels is None:
        return []
    tested = set(labels.tolist())
    names = [name for label, name in enumerate(class_names) if label not in tested]
    if not names:
        return []
    return [f"warning: not tested, as there is no picture for it: {first_names(names)}"]


def split(labels: Tensor, val: float) -> tuple[Tensor, Tensor]:
    """Hold out this part of each class, at least one picture of each class that has
    two, in the same way in every run. Returns the rows to train on, and to test on.
    """
    # Not the run's seed: runs with other seeds are tested on the same images.
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(labels), generator=generator)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = shuffled[labels[shuffled] == label]
        number = max(1, round(len(rows) * val))
        # One picture is left to train on.
        is_test[rows[: min(number, len(rows) - 1)]] = True
    if not is_test.any():
        raise UsageError(f"it has too few pictures ({len(labels)}) for --val {val}")
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()
