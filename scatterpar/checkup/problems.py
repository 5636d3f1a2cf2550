"""What is trained to examine a machine: a small CNN and a small transformer, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scatterpar.devices.verbs import physical

__all__ = ["PROBLEMS", "Problem"]

_CLASSES, _WORDS, _LENGTH = 10, 512, 32


@dataclass(frozen=True)
class Problem:
    """A network, and what it is trained on.

    Attributes:
        name: what reports call it.
        build: makes the network.
        data: makes that many rows of inputs.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Tensor]

    def module(self, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The network, with the same weights every time; the caller's generators stay."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(0)
            return self.build().to(physical(device), dtype)

    def batch(self, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Inputs and labels on the host, the same every time."""
        generator = torch.Generator().manual_seed(1)
        inputs = self.data(rows, generator)
        labels = torch.randint(_CLASSES, (rows,), generator=generator)
        return inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


class _Transformer(nn.Module):
    """Two encoder layers over embedded words, averaged."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Maps integers (rows, length) to logits (rows, classes)."""
        out: Tensor = self.head(self.encoder(self.embed(words)).mean(1))
        return out


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, _CLASSES),
    )


def _images(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=generator)


def _words(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(_WORDS, (rows, _LENGTH), generator=generator)


PROBLEMS = (
    Problem("small CNN", _cnn, _images),
    Problem("small transformer", _Transformer, _words),
)
