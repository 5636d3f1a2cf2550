"""What is trained: four networks with their batches, and a tree like ResNet-101's."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar.train.models import ResNet20, SmallCNN

_IMAGE = (1, 28, 28)
_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network, and how large its batch is and how it is cut."""

    name: str
    build: Callable[[], nn.Module]
    batch: int = 4096
    accum: int = 16

    def module(self) -> nn.Module:
        """The network, with the same weights every time."""
        torch.manual_seed(0)
        return self.build()

    def data(self) -> tuple[Tensor, Tensor]:
        """Images and labels, the same every time."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, *_IMAGE, generator=generator)
        return images, torch.randint(_CLASSES, (self.batch,), generator=generator)

    def small(self) -> "Case":
        """For a smoke run."""
        return replace(self, batch=64, accum=4)


def mlp(width: int = 1024) -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _CLASSES),
    )


def _small_cnn() -> nn.Module:
    return SmallCNN(_IMAGE, _CLASSES)


def _resnet20() -> nn.Module:
    return ResNet20(_IMAGE, _CLASSES)


CASES = {
    "cnn": Case("cnn", _small_cnn),
    "mlp": Case("mlp", mlp),
    "resnet20": Case("resnet20", _resnet20),
}


class LineGPT(nn.Module):
    """A GPT that reads an image line by line, and says its class after the last one."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.lines = nn.Linear(_IMAGE[2], width)
        self.positions = nn.Parameter(torch.zeros(_IMAGE[1], width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """One score per class."""
        hidden = self.blocks(self.lines(images.squeeze(1)) + self.positions)
        return self.head(hidden[:, -1])


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """As many positions as came in, each of which has seen those before it."""
        rows, positions, width = hidden.shape
        split = self.attention(self.before_attention(hidden)).view(
            rows, positions, 3, self.heads, -1
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(seen.transpose(1, 2).reshape(rows, positions, width))
        return hidden + self.mlp(self.before_mlp(hidden))


GPT = Case("gpt", LineGPT, batch=1024)
KNOWN = CASES | {GPT.name: GPT}  # by the names that processes are told


class Bottleneck(nn.Module):
    """A block of ResNet-101: three convolutions, and one more where the size changes."""

    def __init__(self, channels_in: int, width: int, downsample: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if downsample:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, images: Tensor) -> Tensor:
        """The three convolutions' output, added to what came in."""
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        return self.relu(hidden + (images if self.downsample is None else self.downsample(images)))


class ResNet101Tree(nn.Module):
    """The modules, parameters and buffers of ResNet-101, to be kept fresh; nothing runs it.

    Args:
        width: channels of the first stage; the real one has 64.

    >>> tree = ResNet101Tree(4)
    >>> [len(list(found)) for found in (tree.modules(), tree.parameters(), tree.buffers())]
    [287, 314, 312]
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        for stage, blocks in enumerate((3, 4, 23, 3)):
            inner = width * 2**stage
            layer = [Bottleneck(channels, inner, downsample=True)]
            channels = 4 * inner
            layer += [Bottleneck(channels, inner, downsample=False) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layer))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, 1000)
