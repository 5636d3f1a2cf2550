"""The 10,000 images of Fashion-MNIST's test set, which are included (SOURCE.md).

Imports nothing of the package. Runs in the caller's thread.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_TRAIN_IMAGES = 8192


class LabelledImages(NamedTuple):
    """Images as bytes (rows, 1, 28, 28), and the number of the class of each."""

    images: Tensor
    labels: Tensor


def load() -> tuple[LabelledImages, LabelledImages]:
    """Returns the first 8,192 images, to train on, and the other 1,808, to test on."""
    images, labels = read_split(Path(__file__).parent, "t10k")
    # The images are in random order, so that both parts have all classes.
    train = LabelledImages(images[:_TRAIN_IMAGES], labels[:_TRAIN_IMAGES])
    test = LabelledImages(images[_TRAIN_IMAGES:], labels[_TRAIN_IMAGES:])
    return train, test


def read_split(folder: Path, split: str) -> LabelledImages:
    """Read images of 28 x 28 and labels from a folder with MNIST's compressed files."""
    images = _read_bytes(folder / f"{split}-images-idx3-ubyte.gz", header=16)
    labels = _read_bytes(folder / f"{split}-labels-idx1-ubyte.gz", header=8)
    return LabelledImages(images.view(-1, 1, 28, 28), labels.long())


def _read_bytes(path: Path, header: int) -> Tensor:
    content = bytearray(gzip.decompress(path.read_bytes()))
    return torch.frombuffer(content, dtype=torch.uint8, offset=header)
