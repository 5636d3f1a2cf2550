"""The interface between data and the training loop, and the data set that is included."""

from __future__ import annotations

import gzip
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

TRAIN, TEST = "train", "test"
EMBEDDED = "embedded"
_EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
_EMBEDDED_TRAIN_ROWS = 8192
_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


class UsageError(Exception):
    """An argument or a file of the user is wrong. The message is one line."""


def words_of(error: BaseException) -> str:
    """An error's message in one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


class Broken(NamedTuple):
    """An image that cannot be read, and why."""

    name: str
    reason: str


class Images(NamedTuple):
    """Images, uint8 (rows, channels, height, width), labels, row numbers, and unreadable images.

    Labels are int64 (rows,), or float32 (rows, classes) if images were mixed with each other.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor
    broken: Sequence[Broken] = ()


Piece = tuple[str, list[int], int]  # rows that are read at once: part, row numbers, epoch


@dataclass
class Source:
    """Images to train and to test on, with the mean and deviation of their pixels per channel."""

    name: str
    train: Sized
    test: Sized
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor
    in_memory: ClassVar[bool] = False

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Return rows of a part, `TRAIN` or `TEST`, varied as in that epoch."""
        raise NotImplementedError

    def __getitem__(self, piece: Piece) -> Images:
        return self.read(piece[0], torch.tensor(piece[1]), piece[2])

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.image_shape))
        return (
            f"{self.name}: {len(self.train):,} images to train on, {len(self.test):,} to test, "
            f"{len(self.class_names)} classes, {'' if self.in_memory else 'brought to '}{shape}"
        )


@dataclass(frozen=True)
class Split:
    """Images, uint8 (rows, channels, height, width), and their labels, int64 (rows,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Dataset(Source):
    """Images and labels to train and to test on, in memory."""

    train: Split
    test: Split
    in_memory = True

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Return rows of a part; they are the same in every epoch."""
        split = self.train if part == TRAIN else self.test
        return Images(split.images[rows], split.labels[rows], rows)

    def standardise(self, images: Tensor) -> Tensor:
        """Compute `(images - mean) / std`: uint8 to float32, (rows, channels, height, width)."""
        return (images - self.mean[:, None, None]) / self.std[:, None, None]


def load() -> Dataset:
    """Load the images that are included; a part of them is for testing."""
    whole, rows = read_split(_EMBEDDED_FOLDER, "t10k"), _EMBEDDED_TRAIN_ROWS
    train = Split(whole.images[:rows], whole.labels[:rows])
    test = Split(whole.images[rows:], whole.labels[rows:])
    return make_dataset("embedded Fashion-MNIST", train, test, _FASHION)


def make_dataset(name: str, train: Split, test: Split, class_names: tuple[str, ...]) -> Dataset:
    """Make a data set of two splits, with the statistics of the training pixels."""
    _, channels, height, width = train.images.shape
    std, mean = torch.std_mean(train.images.double(), (0, 2, 3), correction=0)
    shape = (channels, height, width)
    return Dataset(name, train, test, class_names, shape, mean.float(), std.float())


def read_split(folder: Path, part: str) -> Split:
    """Read 28 x 28 images and labels from MNIST's IDX files: a header, then single bytes."""

    def content(name: str, header: int) -> Tensor:
        file = gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(file[header:]), dtype=torch.uint8)

    return Split(content("images-idx3", 16).view(-1, 1, 28, 28), content("labels-idx1", 8).long())
