"""The data to train and test on: images in host memory, standardised as they are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scatterpar.train import mnist
from scatterpar.train.errors import UsageError
from scatterpar.train.imagefolder import load_image_folder
from scatterpar.train.split import Split

EMBEDDED = "embedded"
INSTALLED_NAME = "fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
_EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
_EMBEDDED_TRAIN_ROWS = 8192


@dataclass(frozen=True)
class Dataset:
    """Images and labels to train and to test on.

    `mean` and `std` are those of the training pixels, per channel: float32, shape (channels,).
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: Tensor
    std: Tensor

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The images' channels, height and width."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

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


def load(source: str, image_size: int) -> Dataset:
    """Load what `--data` names.

    Args:
        source: a folder (or folder/prefix) of MNIST-family IDX files, a folder of images in
            train/CLASS/ and test/CLASS/, or, where no such folder exists, `"embedded"` or
            `"fashion-mnist"` (the installed Debian package dataset-fashion-mnist).
        image_size: height and width that the images of an image folder are brought to.

    Raises:
        UsageError: there is no such data, or it is not whole and consistent.

    >>> str(load("embedded", image_size=64))
    'embedded Fashion-MNIST: 8,192 images to train on, 1,808 to test, 10 classes, 1 x 28 x 28'
    """
    path = Path(source).expanduser()
    if path.is_dir() and _is_image_folder(path):
        return make_dataset(source, *load_image_folder(path, image_size))
    if path.is_dir() or mnist.is_prefix(path):
        return make_dataset(source, *mnist.load_sets(path))
    if source == EMBEDDED:
        return _load_embedded()
    if source == INSTALLED_NAME:
        return _load_installed()
    raise UsageError(
        f"--data {source}: there is no such folder; "
        f"{EMBEDDED} and {INSTALLED_NAME} (Debian's package) are known by name"
    )


def make_dataset(name: str, train: Split, test: Split) -> Dataset:
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
        classes=len(values),
        mean=mean,
        std=std,
    )


def _load_embedded() -> Dataset:
    whole = mnist.load_pair(
        _EMBEDDED_FOLDER / "t10k-images-idx3-ubyte.gz",
        _EMBEDDED_FOLDER / "t10k-labels-idx1-ubyte.gz",
    )
    train, test = whole.split(_EMBEDDED_TRAIN_ROWS)
    return make_dataset("embedded Fashion-MNIST", train, test)


def _load_installed() -> Dataset:
    if not INSTALLED.is_dir():
        raise UsageError(
            f"--data {INSTALLED_NAME}: {INSTALLED} is not there; install Debian's package "
            "dataset-fashion-mnist, or name the folder that holds the IDX files"
        )
    return make_dataset("Fashion-MNIST", *mnist.load_sets(INSTALLED))


def _is_image_folder(path: Path) -> bool:
    return (path / "train").is_dir() and ((path / "test").is_dir() or (path / "val").is_dir())


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation per channel, exactly, from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    counts = [images[:, c].flatten().bincount(minlength=256) for c in range(images.shape[1])]
    share = torch.stack([count / count.sum() for count in counts]).double()
    mean = share @ values
    std = ((share * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return mean.float(), std.clamp_min(1e-3).float()
