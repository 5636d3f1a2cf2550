"""Pictures that are decoded and transformed when they are asked for, in any process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from scatterpar.train.random_state import drawing_from, seed_of
from scatterpar.train.source import TRAIN, Broken, Images
from scatterpar.train.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Augmentation,
    for_batches,
    for_testing,
    for_training,
)


class Pictures(Protocol):
    """Pictures with labels, each opened on its own."""

    def __len__(self) -> int:
        """How many there are."""

    def name(self, row: int) -> str:
        """Where a picture is, in words."""

    def open(self, row: int) -> tuple[Any, int]:
        """Decode a picture; return a `PIL.Image.Image` in RGB and its label."""


class PictureData:
    """Pictures to train and to test on; each reading decodes them anew.

    What is random about an image is decided by the seed, the epoch and its row alone. So it is
    the same in every worker, and in a run that goes on in the middle of an epoch. (Mixing
    images with each other is decided by the first row of what is read together.)

    Args:
        name: what the data are called.
        train: pictures to train on.
        test: pictures to test on.
        class_names: a name for each label.
        image_size: height and width that they are brought to.
        augmentation: how training images are varied.
        seed: decides what is random.

    Raises:
        UsageError: the augmentation needs torchvision, which does not import.
    """

    in_memory = False

    def __init__(
        self,
        name: str,
        train: Pictures,
        test: Pictures,
        class_names: tuple[str, ...],
        image_size: int,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        self.name = name
        self.train = train
        self.test = test
        self.class_names = class_names
        self.image_shape = (3, image_size, image_size)
        self.mean = torch.tensor(IMAGENET_MEAN)
        self.std = torch.tensor(IMAGENET_STD)
        self.seed = seed
        self._transforms = {
            True: for_training(image_size, augmentation),
            False: for_testing(image_size),
        }
        self._mix = for_batches(augmentation, len(class_names))

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Decode and transform rows of a part, as they are in an epoch."""
        pictures, transform = (
            (self.train, self._transforms[True])
            if part == TRAIN
            else (self.test, self._transforms[False])
        )
        wanted = rows.tolist()
        seeds = [seed_of(self.seed, epoch, row) for row in wanted]
        images, labels, numbers, broken = read_pictures(pictures, wanted, transform, seeds)
        if self._mix is not None and part == TRAIN and len(labels):
            with drawing_from(seed_of(self.seed, epoch, -1 - wanted[0])):
                mixed, labels = self._mix(images.float(), labels)
            images = mixed.round_().to(torch.uint8)
        return Images(images, labels, numbers, broken)

    def __str__(self) -> str:
        size = self.image_shape[1]
        return (
            f"{self.name}: {len(self.train):,} images to train on, {len(self.test):,} to test, "
            f"{len(self.class_names)} classes, brought to 3 x {size} x {size}"
        )


def read_pictures(
    pictures: Pictures,
    rows: list[int],
    transform: Callable[[Any], Tensor],
    seeds: list[int] | None = None,
) -> Images:
    """Decode and transform pictures, each with random numbers from a seed of its own, if any."""
    images: list[Tensor] = []
    labels: list[int] = []
    numbers: list[int] = []
    broken: list[Broken] = []
    with drawing_from(0) as seed:
        for position, row in enumerate(rows):
            try:
                picture, label = pictures.open(row)
            except MemoryError:
                raise
            except Exception as error:  # Pillow's decoders raise many kinds
                broken.append(Broken(pictures.name(row), " ".join(str(error).split())))
                continue
            if seeds is not None:
                seed(seeds[position])
            images.append(transform(picture))
            labels.append(label)
            numbers.append(row)
    stacked = torch.stack(images) if images else torch.empty(0, dtype=torch.uint8)
    return Images(stacked, torch.tensor(labels, dtype=torch.int64), torch.tensor(numbers), broken)
