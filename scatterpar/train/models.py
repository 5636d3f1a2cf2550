"""The two built-in networks."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from scatterpar.train.errors import UsageError

_SMALLEST_SIDE = 8


class SmallCNN(nn.Sequential):
    """Three convolutions and a hidden layer, all with batch normalisation, for two CPU cores.

    Args:
        image_shape: (channels, height, width) of the images; the sides at least 8.
        classes: number of outputs.

    Maps float32 (rows, channels, height, width) to float32 (rows, classes).

    >>> import torch
    >>> SmallCNN((1, 28, 28), classes=10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape
        _require_side("cnn", height, width)
        super().__init__(
            _convolution(channels, 16),
            _convolution(16, 32),
            _convolution(32, 64),
            nn.Flatten(),
            nn.Linear(64 * (height // 8) * (width // 8), 128, bias=False),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


class ResNet20(nn.Module):
    """The residual network of 20 layers for small images.

    A 3 x 3 convolution, three stages of three blocks with 16, 32 and 64 channels at full, half
    and quarter size, global average pooling and a linear layer; shortcuts without parameters
    (option A). He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2,
    arXiv:1512.03385; weights as in He et al. 2015, arXiv:1502.01852.

    Args:
        image_shape: (channels, height, width) of the images; the sides at least 8.
        classes: number of outputs.

    Maps float32 (rows, channels, height, width) to float32 (rows, classes).

    >>> model = ResNet20((3, 32, 32), classes=10)
    >>> sum(parameter.numel() for parameter in model.parameters())
    269722
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        _require_side("resnet20", height, width)
        self.conv1 = _conv3x3(channels, 16, stride=1)
        self.bn1 = nn.BatchNorm2d(16)
        widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
        self.blocks = nn.Sequential(*[ResidualBlock(a, b) for a, b in pairwise(widths)])
        self.head = nn.Linear(64, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Compute the classes' scores."""
        features = self.blocks(F.relu(self.bn1(self.conv1(images))))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut; halves the size where the channels increase."""

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
    """Every `stride`-th pixel, and `extra` channels of zeros after the others (option A)."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, features: Tensor) -> Tensor:
        """Compute the features to add."""
        return F.pad(features[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        _conv3x3(channels_in, channels_out, stride=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def _conv3x3(channels_in: int, channels_out: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


def _require_side(name: str, height: int, width: int) -> None:
    if min(height, width) < _SMALLEST_SIDE:
        raise UsageError(
            f"--model {name} takes images of {_SMALLEST_SIDE} x {_SMALLEST_SIDE} pixels or more, "
            f"but these are {height} x {width}"
        )
