"""Folders of image files, a folder for each class: lists of any length in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from scatterpar.train.errors import UsageError

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Files:
    """Image files with labels.

    The names are kept as one tensor of bytes: a list of a million strings would take ten times
    the memory, and would be copied into every worker process (PyTorch issue 13246); a tensor
    is shared.

    Args:
        root: the folder that the names are in.
        names: relative to `root`.
        labels: a number for each name.

    >>> files = Files(Path("photos"), ["cat/a.jpg", "dog/b.jpg"], [0, 1])
    >>> len(files), files.name(1), int(files.labels[1])
    (2, 'photos/dog/b.jpg', 1)
    """

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.root = root
        joined = bytearray(b"".join(encoded) or b" ")
        self._bytes = torch.frombuffer(joined, dtype=torch.uint8)
        self._ends = torch.tensor([0, *accumulate(map(len, encoded))])
        self.labels = torch.tensor(labels, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, row: int) -> str:
        """Return the file's name, the root's included."""
        start, stop = self._ends[row : row + 2].tolist()
        return os.path.join(self.root, os.fsdecode(self._bytes[start:stop].numpy().tobytes()))

    def open(self, row: int) -> tuple[Any, int]:
        """Decode the file; return it with its label.

        Raises:
            OSError: it cannot be read, or is no whole image.
        """
        return open_image(self.name(row)), int(self.labels[row])


def open_image(name: str) -> Any:
    """Decode an image file as RGB.

    Raises:
        OSError: it cannot be read, or is no whole image.
    """
    from PIL import Image

    with Image.open(name) as image:
        return image.convert("RGB")


def find_images(folder: Path) -> Iterator[str]:
    """Yield the names of the image files below a folder, relative to it, in order.

    Hidden files are left alone: some systems put files like `._photo.jpg` beside pictures.
    """
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                yield os.path.relpath(os.path.join(path, name), folder)


def open_folder(path: Path) -> tuple[Files, Files, tuple[str, ...]]:
    """List path/train/CLASS/* and path/test/CLASS/* (or val), and the classes' names.

    Raises:
        UsageError: a side has no classes or others than the other one, or there is no picture
            of a class to train on.
    """
    held_out = path / "test" if (path / "test").is_dir() else path / "val"
    classes = _classes(path / "train")
    odd = sorted(set(classes) ^ set(_classes(held_out)))
    if odd:
        raise UsageError(
            f"{path}: train and {held_out.name} have different classes ({', '.join(odd)})"
        )
    train, test = _list(path / "train", classes), _list(held_out, classes)
    found = set(torch.unique(train.labels).tolist())
    empty = [name for label, name in enumerate(classes) if label not in found]
    if empty:
        raise UsageError(
            f"{path / 'train'}: no images in the class folders {', '.join(empty)}; images end in "
            f"{', '.join(ENDINGS)}. Remove these folders, in {held_out.name} too, or fill them"
        )
    if not len(test):
        raise UsageError(f"{held_out}: no images in any class folder")
    return train, test, classes


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        entries = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
    classes = tuple(name for name in entries if not name.startswith("."))
    if not classes:
        raise UsageError(f"{folder} has no folders in it: it needs one for each class")
    return classes


def _list(folder: Path, classes: Sequence[str]) -> Files:
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = [os.path.join(name, file) for file in find_images(folder / name)]
        names += found
        labels += [label] * len(found)
    return Files(folder, names, labels)
