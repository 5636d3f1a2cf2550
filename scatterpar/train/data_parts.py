"""The parts of a data set, to train and to test on: their names, files and labels, and
a part that is held out of the training images.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scatterpar.train.command_line import UsageError

TRAIN = "train"
VAL = "val"
TEST = "test"
# As in Hugging Face's datasets, data_files.SPLIT_KEYWORDS, and PASCAL VOC's trainval.
_PART_NAMES = {
    TRAIN: "train|training|trainval",
    VAL: "val|valid|validation|dev",
    TEST: "test|testing|eval|evaluation",
}
# What may follow in a word, as in trainset.
_ENDS_OF_WORDS = "set|data|images|imgs|pictures|photos"
_NO_TESTS = (
    "there are no images to test on: --val 0.1 tests on a tenth of each class; or make "
    "folders train/ and test/ (or val/) with the classes in each"
)
_SHOWN_NAMES = 10
_MOST_COMPARED = 10_000  # files to train on, whose bytes are compared with others
_NO_CLASS = -1


def part_of(name: str) -> str | None:
    """Return the part that a folder or split is for, by a word of its name.

    >>> [part_of(name) for name in ("Training", "seg_test", "ValSet", "val2017", "cat")]
    ['train', 'test', 'val', 'val', None]
    """
    separated = re.sub("([a-z])([A-Z])", r"\1 \2", name).lower()
    parts = []
    for part, names in _PART_NAMES.items():
        if re.search(f"(?<![a-z])({names})({_ENDS_OF_WORDS})?(?![a-z])", separated):
            parts.append(part)
    return parts[0] if len(parts) == 1 else None


def is_part_name(name: str) -> bool:
    """Whether the name is that of a part, and no more, in upper or lower case."""
    return bool(re.fullmatch("|".join(_PART_NAMES.values()), name.lower()))


class Names:
    """Names of files in one tensor, which worker processes share."""

    def __init__(self, names: Sequence[str]) -> None:
        # NumPy pads shorter names with zeros.
        encoded = np.array(list(map(os.fsencode, names)), dtype=np.bytes_)
        letters = encoded.view(np.uint8).reshape(len(names), encoded.itemsize)
        self._letters = torch.from_numpy(letters)

    def __getitem__(self, row: int) -> str:
        letters = bytes(self._letters[row].tolist())
        return os.fsdecode(letters.rstrip(b"\0"))


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
class Listing:
    """Pictures as a folder, a table or a library lists them.

    Attributes:
        sources: the names of files, or the pictures of a library.
        rows: the part and the class of each picture; the class is empty if it has none.
        class_names: the names of the classes.
        unread: the number of files that are not read, by reason.
        notes: what else a reader of the results has to know.
    """

    sources: Any = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    class_names: Sequence[str] = ()
    unread: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@dataclass
class Pictures:
    """Pictures to train and to test on.

    Attributes:
        sources: the pictures of all parts: images in memory (a tensor), the names of
            files, or the pictures of a library.
        labels: the number of the class of each picture.
        parts: the rows of the pictures of `TRAIN` and `TEST`; and of `VAL`, if it
            chooses the best epoch, and `TEST` is tested once, at the end.
        class_names: the names of the classes, by label.
        notes: what else a reader of the results has to know, a line each.
    """

    sources: Any
    labels: Tensor
    parts: dict[str, Tensor]
    class_names: Sequence[str]
    notes: list[str] = field(default_factory=list)

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """The number of images of each class, by part."""
        counts = {}
        for part, rows in self.parts.items():
            labels = self.labels[rows]
            counts[part] = labels.bincount(minlength=len(self.class_names)).tolist()
        return counts


def make_parts(listing: Listing, val: float | None) -> Pictures:
    """Choose what is tested when, and hold out the part `val` of each class of the
    training pictures if there are none to test on.
    """
    class_names = listing.class_names
    if len(class_names) < 2:
        raise UsageError(f"two classes are needed, and it has {list(class_names)}")
    pictures = labelled(listing)
    parts = pictures.parts
    unread = unread_in_words(listing.unread)
    for part in _PART_NAMES:
        listed = {label for other, label in listing.rows if other == part}
        # Competitions keep the labels of test images to themselves, or call all
        # "unknown".
        if part not in parts and (part == TRAIN or len(listed - {""}) > 1):
            raise UsageError(
                f"it has no images to {part} of its classes {first_names(class_names)};"
                f" not read: {unread}"
            )
    train = parts.pop(TRAIN)
    if parts and val is not None:
        raise UsageError("it has images to test on; leave out --val")
    if not parts:
        if val is None:
            raise UsageError(f"{_NO_TESTS}; not read: {unread}")
        is_held_out = hold_out(pictures.labels[train], val)
        parts[TEST] = train[is_held_out]
        train = train[~is_held_out]
    # A single part is tested after each epoch, whatever it is called.
    if TEST not in parts:
        parts[TEST] = parts.pop(VAL)
    pictures.parts = {TRAIN: train, **parts}
    notes = pictures.notes
    for part, rows in parts.items():
        counts = zip(class_names, pictures.class_counts[part], strict=True)
        untested = [name for name, count in counts if not count]
        if untested:
            notes.append(
                "warning: not tested, as there is no picture for it: "
                f"{first_names(untested)}"
            )
        repeated = _repeated(listing.sources, train, rows)
        if repeated:
            notes.append(
                f"warning: {repeated:,} of {len(rows):,} pictures to test on are to "
                "train on, too: the accuracy is not that of new pictures"
            )
    if listing.unread:
        notes.append(f"not read: images or files {unread}")
    notes += listing.notes
    return pictures


def _repeated(sources: Any, train: Tensor, tested: Tensor) -> int:
    """Return the number of files to test on that have the same bytes as one to train
    on.
    """
    if not isinstance(sources, list) or len(train) > _MOST_COMPARED:
        return 0
    names = [sources[row] for row in train]
    tested_names = [sources[row] for row in tested]
    # Few photographs have the same size: reading all would take minutes.
    sizes = set(map(_size, names)) & set(map(_size, tested_names)) - {0}
    digests = {_digest(name) for name in names if _size(name) in sizes}
    suspects = [name for name in tested_names if _size(name) in sizes]
    return sum(_digest(name) in digests for name in suspects)


def _size(name: str) -> int:
    """Return the number of bytes of a file; 0 if it cannot be read, which the feed
    reports.
    """
    try:
        return os.path.getsize(name)
    except OSError:
        return 0


def _digest(name: str) -> bytes:
    """Return a digest of the bytes of a file, or its name if it cannot be read."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).digest()
    except OSError:
        return os.fsencode(name)


def labelled(listing: Listing) -> Pictures:
    """Return the pictures that have a class, by part, and count the others."""
    class_names = listing.class_names
    unread = listing.unread
    # Parts that people made by hand differ in the case of a class.
    numbers = {name.lower(): number for number, name in enumerate(class_names)}
    numbers |= {name: number for number, name in enumerate(class_names)}
    labels = []
    other_parts = Counter[str]()
    rows_of_parts = defaultdict[str, list[int]](list)
    for row, (part, label) in enumerate(listing.rows):
        number = numbers.get(label, numbers.get(label.lower(), _NO_CLASS))
        labels.append(number)
        if part not in _PART_NAMES:
            other_parts[part or "no name"] += 1
        elif number != _NO_CLASS:
            rows_of_parts[part].append(row)
        elif label:
            unread[f"of classes that the training images lack ({label})"] += 1
        else:
            unread[f"without a label ({part})"] += 1
    # A table may have many of them.
    if other_parts:
        names = first_names(sorted(other_parts))
        unread[f"in other parts ({names})"] = other_parts.total()
    parts = {}
    for part in _PART_NAMES:
        if part in rows_of_parts:
            parts[part] = torch.tensor(rows_of_parts[part])
    sources = listing.sources
    # Worker processes share names in a tensor.
    if isinstance(sources, list):
        sources = Names(sources)
    return Pictures(sources, torch.tensor(labels), parts, tuple(class_names))


def hold_out(labels: Tensor, val: float) -> Tensor:
    """Return which pictures are to test on: this part of each class, at least one
    picture of each class that has two, the same ones in every run.
    """
    # Not the run's seed: runs with other seeds are tested on the same images.
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(labels), generator=generator)
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = shuffled[labels[shuffled] == label]
        number = max(1, round(len(rows) * val))
        # One picture is left to train on.
        is_held_out[rows[: min(number, len(rows) - 1)]] = True
    if not is_held_out.any():
        raise UsageError(f"it has too few pictures ({len(labels)}) for --val {val}")
    return is_held_out
