"""What is trained: three networks with their batches, and parts of larger ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar.train import SmallCNN

_IMAGE = (1, 28, 28)
_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network, the rows of its batch, and its sub-steps per replica."""

    name: str
    build: Callable[[], nn.Module]
    batch: int = 4096
    accum: int = 16

    @property
    def size(self) -> tuple[str, int, int]:
        """What another process makes the same case of: name, batch, accum."""
        return self.name, self.batch, self.accum

    def module(self) -> nn.Module:
        """The network, with the same weights every time."""
        torch.manual_seed(0)
        return self.build()

    def data(self) -> tuple[Tensor, Tensor]:
        """Images and labels, the same every time."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, *_IMAGE, generator=generator)
        labels = torch.randint(_CLASSES, (self.batch,), generator=generator)
        return images, labels

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


class ResNet20(nn.Module):
    """The residual network of 20 layers for small images.

    A 3 x 3 convolution, three stages of three blocks with 16, 32 and 64 channels at
    full, half and quarter size, global average pooling and a linear layer; shortcuts
    without parameters (option A). He et al. 2016, "Deep Residual Learning for Image
    Recognition", section 4.2, arXiv:1512.03385; weights as in He et al. 2015,
    arXiv:1502.01852.
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels = image_shape[0]
        self.conv1 = _conv3x3(channels, 16, 1)
        self.bn1 = nn.BatchNorm2d(16)
        # The stem's channels, then those of three blocks in each of three stages.
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        blocks = [ResidualBlock(*channels) for channels in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(
                    layer.weight, mode="fan_out", nonlinearity="relu"
                )

    def forward(self, images: Tensor) -> Tensor:
        """Compute the classes' scores."""
        features = self.blocks(F.relu(self.bn1(self.conv1(images))))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut; half the size if there are more channels."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels_out else 2
        self.conv1 = _conv3x3(channels_in, channels_out, stride)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv3x3(channels_out, channels_out, stride=1)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = PaddedShortcut(channels_out - channels_in, stride)

    def forward(self, features: Tensor) -> Tensor:
        """Compute the block's features."""
        out = F.relu(self.bn1(self.conv1(features)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(features))


class PaddedShortcut(nn.Module):
    """Every `stride`-th pixel, then `extra` channels of zeros (option A)."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, features: Tensor) -> Tensor:
        """Compute the features to add."""
        strided = features[:, :, :: self.stride, :: self.stride]
        return F.pad(strided, (0, 0, 0, 0, 0, self.extra))


def _conv3x3(channels_in: int, channels_out: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


def _resnet20() -> nn.Module:
    return ResNet20(_IMAGE, _CLASSES)


CASES = {
    "cnn": Case("cnn", _small_cnn),
    "mlp": Case("mlp", mlp),
    "resnet20": Case("resnet20", _resnet20),
}


class Bottleneck(nn.Module):
    """A block of ResNet-101: three convolutions, and one more if ``downsample``."""

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
                nn.Conv2d(channels_in, 4 * width, 1, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, images: Tensor) -> Tensor:
        """The three convolutions' output, added to the images."""
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        if self.downsample is not None:
            images = self.downsample(images)
        return self.relu(hidden + images)


class ResNet101Tree(nn.Module):
    """The modules, parameters and buffers of ResNet-101. Its forward pass is missing.

    Args:
        width: channels of the first stage; the real one has 64.

    >>> tree = ResNet101Tree(4)
    >>> len(list(tree.modules())), len(list(tree.parameters()))
    (287, 314)
    >>> len(list(tree.buffers()))
    312
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
            layer = nn.Sequential()
            for number in range(blocks):
                layer.append(Bottleneck(channels, inner, downsample=number == 0))
                channels = 4 * inner
            setattr(self, f"layer{stage + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, 1000)
