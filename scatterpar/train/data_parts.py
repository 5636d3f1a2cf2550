"""The parts of a data set, to train and to test on: their names, files and labels, and
a part that is held out of the training images.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scatterpar.train.command_line import UsageError

TRAIN = "train"
VAL = "val"
TEST = "test"
# As in Hugging Face's datasets, data_files.SPLIT_KEYWORDS, and PASCAL VOC's trainval.
_PART_NAMES = {
    TRAIN: "train training trainval",
    VAL: "val valid validation dev",
    TEST: "test testing eval evaluation",
}
# Ends of a word, as in trainset: the name of the part comes before them.
_ENDS_OF_WORDS = re.compile("(set|data|images|imgs|pictures|photos)$")
_NO_TESTS = (
    "there are no images to test on: --val 0.1 tests on a tenth of each class; or make "
    "folders train/ and test/ (or val/) with the classes in each"
)
_SHOWN_NAMES = 10
_MOST_COMPARED = 10_000  # files to train on, whose bytes are compared with others


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


class Names:
    """Names of files in one tensor, which worker processes share."""

    def __init__(self, names: Sequence[str]) -> None:
        # NumPy pads shorter names with zeros.
        encoded = np.array(list(map(os.fsencode, names)), dtype=np.bytes_)
        letters = encoded.view(np.uint8).reshape(len(names), encoded.itemsize)
        self._letters = torch.from_numpy(letters)

    def __len__(self) -> int:
        return len(self._letters)

    def __getitem__(self, row: int) -> str:
        letters = bytes(self._letters[row].tolist())
        return os.fsdecode(letters.rstrip(b"\0"))


class Pictures:
    """Pictures, each with the number of its class.

    Args:
        sources: `Names` of files, or the pictures of a library.
        labels: the number of the class of each picture.
        rows: the places of the pictures in the sources; by default all.
    """

    def __init__(
        self, sources: Any, labels: Tensor, rows: Tensor | None = None
    ) -> None:
        self.sources = sources
        self.labels = labels
        self._rows = torch.arange(len(labels)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.sources[int(self._rows[row])], int(self.labels[row])

    def select(self, rows: Tensor) -> Pictures:
        """Return these pictures only."""
        return Pictures(self.sources, self.labels[rows], self._rows[rows])


def first_names(names: Sequence[str], most: int = _SHOWN_NAMES) -> str:
    """Return a list of names as text: the first ones, and how many follow."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", and {len(names) - most:,} more"
    return text


def unread_in_words(unread: Counter[str]) -> str:
    """Return how many files are not read, by reason."""
    texts = [f"{number:,} {reason}" for reason, number in unread.items()]
    return first_names(texts) or "nothing"


@dataclass
class DataParts:
    """The pictures of a data set, by part, and its classes.

    Attributes:
        parts: the pictures of `TRAIN` and `TEST`; and of `VAL`, if it chooses the best
            epoch, and `TEST` is tested once, at the end.
        class_names: the names of the classes; a label is the place of a name.
        notes: what else a reader of the results has to know.
    """

    parts: dict[str, Any]
    class_names: Sequence[str]
    notes: list[str] = field(default_factory=list)


class ListedPictures(NamedTuple):
    """Pictures of a part, as a folder, a table or a library lists them.

    Attributes:
        sources: the pictures, as those of `Pictures`.
        labels: the name of the class of each picture; empty if it has none.
    """

    sources: Any
    labels: Sequence[str]


def make_parts(
    rows_of_parts: Mapping[str, ListedPictures],
    class_names: Sequence[str],
    unread: Counter[str],
    val: float | None,
) -> DataParts:
    """Choose what is tested when, and hold out the part `val` of the training pictures
    if there are none to test on.

    Args:
        rows_of_parts: the pictures by part; there are some to train on.
        class_names: the names of the classes.
        unread: the number of files that are not read, by reason; pictures without a
            class are added.
        val: the part of each class to hold out.
    """
    if len(class_names) < 2:
        raise UsageError(f"two classes are needed, and it has {list(class_names)}")
    pictures = {}
    for part, rows in rows_of_parts.items():
        pictures[part] = labelled(part, rows, class_names, unread)
    train = pictures[TRAIN]
    tested = [pictures[part] for part in (VAL, TEST) if pictures.get(part)]
    if tested and val is not None:
        raise UsageError("it has images to test on; leave out --val")
    if not tested:
        if val is None:
            raise UsageError(f"{_NO_TESTS}; not read: {unread_in_words(unread)}")
        held_in, held_out = split(train.labels, val)
        tested = [train.select(held_out)]
        train = train.select(held_in)
    notes = []
    for tested_part in tested:
        present = set(tested_part.labels.tolist())
        names = [name for label, name in enumerate(class_names) if label not in present]
        if names:
            notes.append(
                "warning: not tested, as there is no picture for it: "
                f"{first_names(names)}"
            )
        repeated = _repeated(train, tested_part)
        if repeated:
            notes.append(
                f"warning: {repeated:,} of {len(tested_part):,} pictures to test on "
                "are to train on, too: the accuracy is not that of new pictures"
            )
    if unread:
        notes.append(f"not read: images or files {unread_in_words(unread)}")
    # A single part is tested after each epoch, whatever it is called.
    tested_names = (VAL, TEST)[-len(tested) :]
    parts = {TRAIN: train, **dict(zip(tested_names, tested, strict=True))}
    return DataParts(parts, class_names, notes)


def _repeated(train: Pictures, tested: Pictures) -> int:
    """Return the number of files to test on that have the same bytes as one to train
    on.
    """
    if not isinstance(train.sources, Names) or len(train) > _MOST_COMPARED:
        return 0
    names_by_size = _names_by_size(train)
    number = 0
    for size, names in _names_by_size(tested).items():
        # Few photographs have the same size: reading all would take minutes.
        if size in names_by_size:
            digests = set(map(_digest, names_by_size[size]))
            number += sum(_digest(name) in digests for name in names)
    return number


def _names_by_size(pictures: Pictures) -> dict[int, list[str]]:
    """Return the names of the files by the number of their bytes."""
    names = defaultdict[int, list[str]](list)
    for row in range(len(pictures)):
        name, _ = pictures[row]
        with contextlib.suppress(OSError):  # the feed reports it
            names[os.path.getsize(name)].append(name)
    return names


def _digest(name: str) -> bytes:
    """Return a digest of a file's bytes, or its name if it cannot be read."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).digest()
    except OSError:
        return os.fsencode(name)


def labelled(
    part: str, rows: ListedPictures, class_names: Sequence[str], unread: Counter[str]
) -> Pictures:
    """Return the pictures of a part that have a class, and count the others."""
    # Parts that people made by hand differ in the case of a class.
    numbers = {name.lower(): number for number, name in enumerate(class_names)}
    numbers |= {name: number for number, name in enumerate(class_names)}
    pairs = []
    unknown = set()
    for row, label in enumerate(rows.labels):
        number = numbers.get(label, numbers.get(label.lower()))
        if number is not None:
            pairs.append((row, number))
        elif label:
            unread[f"of classes that the training images lack ({label})"] += 1
            unknown.add(label)
        else:
            unread[f"without a label ({part})"] += 1
    # Competitions keep the labels of test images to themselves, or call all "unknown".
    if not pairs and (part == TRAIN or len(unknown) > 1):
        raise UsageError(
            f"it has no images to {part} of its classes {first_names(class_names)}; "
            f"not read: {unread_in_words(unread)}"
        )
    places, labels = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    return Pictures(rows.sources, labels, places)


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
