"""What data are to the training loop, wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import NamedTuple, Protocol

from torch import Tensor

TRAIN, TEST = "train", "test"


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
    """Images to train and to test on."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def train(self) -> Sized:
        """What there is to train on."""

    @property
    def test(self) -> Sized:
        """What there is to test on."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """A name for each label, counted from 0."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""

    @property
    def mean(self) -> Tensor:
        """The mean of the pixels, 0 to 255, per channel: float32 (channels,)."""

    @property
    def std(self) -> Tensor:
        """Likewise the standard deviation."""

    @property
    def in_memory(self) -> bool:
        """Whether reading is so quick that no worker is needed for it."""

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Return rows of a part, `TRAIN` or `TEST`, as they are in an epoch."""
