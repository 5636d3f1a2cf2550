"""What data are to the training loop, and the sets that stay in memory: the MNIST family's."""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from scatterpar.train.errors import UsageError

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
_NAME = re.compile(
    r"(?P<prefix>.*?)-?(?P<part>train|t10k|test)-(?P<kind>images|labels)[-.]idx[13]-ubyte(\.gz)?"
)
_WANTED = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_KINDS = {1: "labels", 3: "images"}
_Files = dict[str, Path]


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


class Source(Protocol):
    """Images to train and to test on; `mean` and `std` are those of their pixels, per channel."""

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor
    in_memory: bool

    @property
    def train(self) -> Sized:
        """What there is to train on."""

    @property
    def test(self) -> Sized:
        """What there is to test on."""

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Return rows of a part, `TRAIN` or `TEST`, as they are in an epoch."""


@dataclass(frozen=True)
class Split:
    """Images, uint8 (rows, channels, height, width), and their labels, int64 (rows,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Dataset:
    """Images and labels to train and to test on, in memory."""

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor
    in_memory: bool = True

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

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

    def __str__(self) -> str:
        shape = " x ".join(str(size) for size in self.image_shape)
        return (
            f"{self.name}: {len(self.train):,} images to train on, {len(self.test):,} to test, "
            f"{self.classes} classes, {shape}"
        )


def load(source: str) -> Dataset:
    """Load a small set into memory.

    Args:
        source: a folder (or folder/prefix) of MNIST-family IDX files, or, where no such folder
            exists, `"embedded"` or `"fashion-mnist"` (the installed Debian package
            dataset-fashion-mnist).

    Raises:
        UsageError: there is no such data, or it is not whole and consistent.

    >>> str(load("embedded"))
    'embedded Fashion-MNIST: 8,192 images to train on, 1,808 to test, 10 classes, 1 x 28 x 28'
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.parent.is_dir() and path.name in _find(path.parent)):
        return make_dataset(source, *_load_sets(path))
    if source == EMBEDDED:
        images, labels = (_EMBEDDED_FOLDER / f"{name}-ubyte.gz" for name in _WANTED[2:])
        whole, rows = _load_pair(images, labels), _EMBEDDED_TRAIN_ROWS
        train = Split(whole.images[:rows], whole.labels[:rows])
        test = Split(whole.images[rows:], whole.labels[rows:])
        return make_dataset("embedded Fashion-MNIST", train, test, _FASHION)
    if source == INSTALLED_NAME and INSTALLED.is_dir():
        return make_dataset("Fashion-MNIST", *_load_sets(INSTALLED), _FASHION)
    if source == INSTALLED_NAME:
        raise UsageError(
            f"--data {INSTALLED_NAME}: {INSTALLED} is not there; install Debian's package "
            "dataset-fashion-mnist, or name the folder that holds the IDX files"
        )
    raise UsageError(
        f"--data {source}: there is no such folder; known by name are {EMBEDDED}, "
        f"{INSTALLED_NAME} (Debian's package), torchvision:NAME and datasets:NAME"
    )


def make_dataset(
    name: str, train: Split, test: Split, class_names: tuple[str, ...] | None = None
) -> Dataset:
    """Put the two splits together, with their labels counted from 0 and the pixels' statistics.

    Labels become 0, 1, … in the order of the training labels' values, so that a set that counts
    from 1 needs no class that never occurs.

    Raises:
        UsageError: the splits have images of different shapes, or the test labels are unknown.
    """
    shapes = [tuple(split.images.shape[1:]) for split in (train, test)]
    if shapes[0] != shapes[1]:
        raise UsageError(f"{name}: training images are {shapes[0]}, but test images {shapes[1]}")
    values = torch.unique(train.labels)
    unknown = sorted(set(torch.unique(test.labels).tolist()) - set(values.tolist()))
    if unknown:
        raise UsageError(f"{name}: the test labels {unknown} do not occur in the training labels")
    channels, height, width = shapes[0]
    return Dataset(
        name,
        Split(train.images, torch.searchsorted(values, train.labels)),
        Split(test.images, torch.searchsorted(values, test.labels)),
        class_names or tuple(str(value) for value in values.tolist()),
        (channels, height, width),
        *_pixel_statistics(train.images),
    )


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation per channel, exactly, from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = [images[:, c].flatten().bincount(minlength=256) for c in range(images.shape[1])]
    share = torch.stack([count / count.sum() for count in counts]).double()
    mean = share @ values
    std = ((share * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return mean.float(), std.clamp_min(1e-3).float()


def _load_sets(path: Path) -> tuple[Split, Split]:
    """Load the training and the test split of a folder, or of a folder/prefix.

    Files are named as MNIST, Fashion-MNIST, KMNIST and EMNIST name theirs, with or without .gz;
    where both are there, the one without is read.
    """
    folder, prefix = (path, None) if path.is_dir() else (path.parent, path.name)
    sets = _find(folder)
    if not sets:
        raise UsageError(
            f"{folder} holds neither MNIST-family files (train-images-idx3-ubyte and so on, "
            "gzip or not) nor image folders train/ and test/ with a folder for each class"
        )
    if prefix is None and len(sets) > 1:
        choices = ", ".join(str(folder / name) for name in sorted(sets))
        raise UsageError(f"{folder} holds {len(sets)} data sets; choose one: --data {choices}")
    prefix = next(iter(sets)) if prefix is None else prefix
    files, start = sets[prefix], f"{prefix}-" if prefix else ""
    if missing := [f"{start}{name}-ubyte" for name in _WANTED if name not in files]:
        raise UsageError(f"{folder} lacks {', '.join(missing)} (gzip or not)")
    upright = not prefix.startswith("emnist")  # whose images are stored transposed
    train = _load_pair(files[_WANTED[0]], files[_WANTED[1]], upright)
    return train, _load_pair(files[_WANTED[2]], files[_WANTED[3]], upright)


def _find(folder: Path) -> dict[str, _Files]:
    """Map each prefix to its files, under the names of `_WANTED`."""
    sets: dict[str, _Files] = {}
    for file in sorted(folder.iterdir(), reverse=True):  # plain files after their .gz twins
        if match := _NAME.fullmatch(file.name):
            part = "train" if match["part"] == "train" else "t10k"
            dimensions = 3 if match["kind"] == "images" else 1
            files = sets.setdefault(match["prefix"], {})
            files[f"{part}-{match['kind']}-idx{dimensions}"] = file
    return sets


def _load_pair(images_path: Path, labels_path: Path, upright: bool = True) -> Split:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise UsageError(
            f"{labels_path} has {len(labels)} labels, but {images_path} has {len(images)} images"
        )
    images = images if upright else images.transpose(1, 2).contiguous()
    return Split(images.unsqueeze(1), labels.long())


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of images (3 dimensions) or labels (1): uint8, (images, height, width).

    The format: two zero bytes, a byte for the element type (8: unsigned bytes), a byte for the
    number of dimensions, each dimension as a big-endian 32-bit number, and then the elements.
    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".

    Raises:
        UsageError: the file cannot be read, or is not whole, with what is off.
    """
    content, begins = _bytes_of(path), 4 + 4 * dimensions
    begin = content[:4].hex(" ")
    expected = f"a file of {_KINDS[dimensions]} begins with 00 00 08 {dimensions:02x}"
    if len(content) < 4:
        raise UsageError(f"{path} is truncated: it has {len(content)} bytes, but {expected}")
    if content[:2] != b"\0\0":
        raise UsageError(f"{path} is not an IDX file: it begins with {begin}, but {expected}")
    if content[2] != 8:
        raise UsageError(f"{path} does not hold unsigned bytes: it begins with {begin}, {expected}")
    if content[3] != dimensions:
        kind = _KINDS.get(content[3], f"{content[3]}-dimensional data")
        raise UsageError(
            f"{path} holds {kind} where {_KINDS[dimensions]} are expected: "
            f"it begins with {begin}, but {expected}"
        )
    if len(content) < begins:
        raise UsageError(f"{path} is truncated: it ends within its header")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    sizes, size, found = " x ".join(map(str, shape)), math.prod(shape), len(content) - begins
    if found != size:
        fault = "truncated" if found < size else "longer than it says"
        raise UsageError(
            f"{path} is {fault}: its header promises {sizes} = {size} bytes of data, "
            f"but {found} follow it"
        )
    if not size:
        raise UsageError(f"{path} is empty: its header says {sizes}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=begins).view(shape)


def _bytes_of(path: Path) -> bytearray:
    try:
        content = path.read_bytes()
        is_compressed, says_compressed = content.startswith(b"\x1f\x8b"), path.suffix == ".gz"
        if says_compressed and not is_compressed:
            raise UsageError(f"{path} is not a gzip file, though its name ends in .gz")
        if is_compressed and not says_compressed:
            raise UsageError(
                f"{path} is a gzip file, though its name does not end in .gz: rename it"
            )
        return bytearray(gzip.decompress(content) if is_compressed else content)
    except EOFError as error:
        raise UsageError(f"{path} is truncated: its gzip data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
