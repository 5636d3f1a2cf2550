"""Small sets of images, which stay in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scatterpar.train import mnist
from scatterpar.train.errors import UsageError
from scatterpar.train.source import TRAIN, Images
from scatterpar.train.split import Split

EMBEDDED = "embedded"
INSTALLED_NAME = "fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
_EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
_EMBEDDED_TRAIN_ROWS = 8192
_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


@dataclass(frozen=True)
class Dataset:
    """Images and labels to train and to test on, in memory.

    `mean` and `std` are those of the training pixels, per channel: float32, shape (channels,).
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: Tensor
    std: Tensor
    in_memory = True

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The images' channels, height and width."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

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
    if path.is_dir() or mnist.is_prefix(path):
        return make_dataset(source, *mnist.load_sets(path))
    if source == EMBEDDED:
        return _load_embedded()
    if source == INSTALLED_NAME:
        return _load_installed()
    raise UsageError(
        f"--data {source}: there is no such folder; known by name are {EMBEDDED}, "
        f"{INSTALLED_NAME} (Debian's package) and torchvision:NAME"
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
    mean, std = _pixel_statistics(train.images)
    return Dataset(
        name=name,
        train=Split(train.images, torch.searchsorted(values, train.labels)),
        test=Split(test.images, torch.searchsorted(values, test.labels)),
        class_names=class_names or tuple(str(value) for value in values.tolist()),
        mean=mean,
        std=std,
    )


def _load_embedded() -> Dataset:
    whole = mnist.load_pair(
        _EMBEDDED_FOLDER / "t10k-images-idx3-ubyte.gz",
        _EMBEDDED_FOLDER / "t10k-labels-idx1-ubyte.gz",
    )
    train, test = whole.split(_EMBEDDED_TRAIN_ROWS)
    return make_dataset("embedded Fashion-MNIST", train, test, _FASHION)


def _load_installed() -> Dataset:
    if not INSTALLED.is_dir():
        raise UsageError(
            f"--data {INSTALLED_NAME}: {INSTALLED} is not there; install Debian's package "
            "dataset-fashion-mnist, or name the folder that holds the IDX files"
        )
    return make_dataset("Fashion-MNIST", *mnist.load_sets(INSTALLED), _FASHION)


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation per channel, exactly, from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = [images[:, c].flatten().bincount(minlength=256) for c in range(images.shape[1])]
    share = torch.stack([count / count.sum() for count in counts]).double()
    mean = share @ values
    std = ((share * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return mean.float(), std.clamp_min(1e-3).float()
