"""What data are to the training loop, and the sets that stay in memory: IDX files, like MNIST's."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

TRAIN, TEST = "train", "test"
EMBEDDED = "embedded"
INSTALLED_NAME = "fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
_EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
_EMBEDDED_TRAIN_ROWS = 8192
_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_KINDS = {1: "labels", 3: "images"}


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line that says why."""


def words_of(error: BaseException) -> str:
    """An error's message in one line, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class Broken(NamedTuple):
    """An image that cannot be read, and why."""

    name: str
    reason: str


class Images(NamedTuple):
    """Images that were asked for, with their labels.

    Attributes:
        images: uint8 (rows, channels, height, width).
        labels: int64 (rows,); float32 (rows, classes) where images are mixed with each other.
        rows: their numbers, int64 (rows,).
        broken: those that could not be read, and are therefore not among the rows.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor
    broken: Sequence[Broken] = ()


@dataclass
class Source:
    """Images to train and to test on; `mean` and `std` are those of their pixels, per channel."""

    name: str
    train: Sized
    test: Sized
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor
    in_memory: ClassVar[bool] = False

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Return rows of a part, `TRAIN` or `TEST`, as they are in an epoch."""
        raise NotImplementedError

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
        """Compute `(images - mean) / std`: uint8 to float32, both (rows, channels, height, width).

        >>> import torch
        >>> split = Split(torch.tensor([0, 2], dtype=torch.uint8).view(2, 1, 1, 1), torch.arange(2))
        >>> make_dataset("two pixels", split, split).standardise(split.images).flatten().tolist()
        [-1.0, 1.0]
        """
        return (images - self.mean[:, None, None]) / self.std[:, None, None]


def load(source: str) -> Dataset:
    """Load a small set into memory.

    Args:
        source: a folder of MNIST's four IDX files, gzip or not, or, where no such folder
            exists, `"embedded"` or `"fashion-mnist"` (the installed Debian package
            dataset-fashion-mnist).

    Raises:
        UsageError: there is no such data, or it is not whole and consistent.

    >>> str(load("embedded"))
    'embedded Fashion-MNIST: 8,192 images to train on, 1,808 to test, 10 classes, 1 x 28 x 28'
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return make_dataset(source, _load_split(path, "train"), _load_split(path, "t10k"))
    if source == EMBEDDED:
        whole, rows = _load_split(_EMBEDDED_FOLDER, "t10k"), _EMBEDDED_TRAIN_ROWS
        train = Split(whole.images[:rows], whole.labels[:rows])
        test = Split(whole.images[rows:], whole.labels[rows:])
        return make_dataset("embedded Fashion-MNIST", train, test, _FASHION)
    if source == INSTALLED_NAME and INSTALLED.is_dir():
        train, test = (_load_split(INSTALLED, part) for part in ("train", "t10k"))
        return make_dataset("Fashion-MNIST", train, test, _FASHION)
    if source == INSTALLED_NAME:
        raise UsageError(
            f"--data {INSTALLED_NAME}: {INSTALLED} is not there; install Debian's package "
            "dataset-fashion-mnist, or name the folder that holds the IDX files"
        )
    raise UsageError(
        f"--data {source}: there is no such folder; known by name are {EMBEDDED}, "
        f"{INSTALLED_NAME} (Debian's package), torch/NAME and hfds/NAME"
    )


def make_dataset(
    name: str, train: Split, test: Split, class_names: tuple[str, ...] | None = None
) -> Dataset:
    """Put the two splits together, with the pixels' statistics.

    Raises:
        UsageError: the splits have images of different shapes, or the test labels are unknown.
    """
    shapes = [tuple(split.images.shape[1:]) for split in (train, test)]
    if shapes[0] != shapes[1]:
        raise UsageError(f"{name}: training images are {shapes[0]}, but test images {shapes[1]}")
    if unknown := sorted({*test.labels.tolist()} - {*train.labels.tolist()}):
        raise UsageError(f"{name}: the test labels {unknown} do not occur in the training labels")
    names = class_names or tuple(str(label) for label in range(int(train.labels.max()) + 1))
    channels, height, width = shapes[0]
    statistics = _pixel_statistics(train.images)
    return Dataset(name, train, test, names, (channels, height, width), *statistics)


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation per channel, exactly, from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = [images[:, c].flatten().bincount(minlength=256) for c in range(images.shape[1])]
    share = torch.stack([count / count.sum() for count in counts]).double()
    mean = share @ values
    std = ((share * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return mean.float(), std.clamp_min(1e-3).float()


def _load_split(folder: Path, part: str) -> Split:
    """Load images and labels under the names that MNIST, Fashion-MNIST and KMNIST give them."""
    paths = []
    for kind in ("images-idx3", "labels-idx1"):
        name = f"{part}-{kind}-ubyte"
        found = [folder / file for file in (name, f"{name}.gz") if (folder / file).is_file()]
        if not found:
            raise UsageError(
                f"{folder} holds neither image folders train/ and test/ with a folder for each "
                f"class nor MNIST's files: it lacks {name}, gzip or not"
            )
        paths.append(found[0])
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if len(images) != len(labels):
        raise UsageError(
            f"{paths[1]} has {len(labels)} labels, but {paths[0]} has {len(images)} images"
        )
    return Split(images.unsqueeze(1), labels.long())


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of images (3 dimensions) or labels (1): uint8, (images, height, width).

    The format: two zero bytes, a byte for the element type (8: unsigned bytes), a byte for the
    number of dimensions, each dimension as a big-endian 32-bit number, and then the elements.
    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".

    Raises:
        UsageError: the file cannot be read, or is not whole, with what is off.
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {words_of(error)}") from error
    begin, begins = bytes((0, 0, 8, dimensions)), 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}I", content.ljust(begins, b"\0"), 4)
    size = math.prod(shape)
    if content[:4] != begin or len(content) != begins + size or not size:
        raise UsageError(
            f"{path} is not a whole IDX file of {_KINDS[dimensions]}: it begins with "
            f"{content[:4].hex(' ') or 'nothing'} and has {len(content)} bytes, where "
            f"{begin.hex(' ')} and {begins + size} are expected, for {' x '.join(map(str, shape))}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=begins).view(shape)
