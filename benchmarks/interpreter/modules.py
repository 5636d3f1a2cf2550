"""Modules that compute next to nothing: the Python that calls operators takes the time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.blocks import Block
from benchmarks.models import Bottleneck

_CLASSES = 4
_LETTERS = 32
_POSITIONS = 8


class TinyResNet50(nn.Module):
    """The blocks of ResNet-50, four channels wide, on images of 4 x 4."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        )
        channels = width
        self.blocks = nn.Sequential()
        for count in (3, 4, 6, 3):
            for number in range(count):
                block = Bottleneck(channels, width, downsample=number == 0)
                self.blocks.append(block)
                channels = 4 * width
        self.head = nn.Linear(channels, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """One score per class."""
        features = self.blocks(self.stem(images))
        return self.head(features.mean((2, 3)))


class TinyGPT(nn.Module):
    """Twelve blocks of a GPT, 16 wide."""

    def __init__(self, width: int = 16, depth: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(_LETTERS, width)
        self.positions = nn.Parameter(torch.zeros(_POSITIONS, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, _LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """A score for each letter and position; letters first, for cross entropy."""
        hidden = self.blocks(self.letters(text) + self.positions)
        return self.head(hidden).transpose(1, 2)


@dataclass(frozen=True)
class Subject:
    """A module, and how its batch is made."""

    title: str
    build: Callable[[], nn.Module]
    make: Callable[[int], tuple[Tensor, Tensor]]


def _features(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randint(_CLASSES, (rows,))


def _images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 4, 4), torch.randint(_CLASSES, (rows,))


def _text(rows: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(_LETTERS, (rows, _POSITIONS + 1))
    return text[:, :-1], text[:, 1:]


def _layer() -> nn.Module:
    return nn.Linear(4, _CLASSES)


SUBJECTS = {
    "layer": Subject("one small layer", _layer, _features),
    "resnet": Subject("a ResNet-50, four channels wide", TinyResNet50, _images),
    "gpt": Subject("a GPT of twelve blocks, 16 wide", TinyGPT, _text),
}
