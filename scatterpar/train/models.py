"""The built-in networks, and from the name of a model to one that takes the data's images."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scatterpar.train.errors import UsageError, words_of
from scatterpar.train.pictures import import_timm

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
            f"{name} takes images of {_SMALLEST_SIDE} x {_SMALLEST_SIDE} pixels or more, "
            f"but these are {height} x {width}"
        )


BUILT_IN = {"cnn": SmallCNN, "resnet20": ResNet20}


class OnPixels(nn.Module):
    """A network that takes pixels as they are in files, and standardises them itself.

    So bytes go to the devices rather than floating-point numbers, a quarter of the traffic, and
    each device converts its own share. The network's state dict stays its own.

    Args:
        network: takes standardised images.
        mean: of the pixels, per channel.
        std: likewise the standard deviation.
        grey_to_colour: repeat the one channel of grey images for a network that takes three.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, mean: Tensor, std: Tensor, grey_to_colour: bool = False
    ) -> None:
        super().__init__()
        self.network = network
        self.grey_to_colour = grey_to_colour
        self.register_buffer("mean", mean.float().view(-1, 1, 1), persistent=False)
        self.register_buffer("std", std.float().view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Any:
        """Compute the network's output for pixels of 0 to 255: (rows, channels, height, width)."""
        images = (images - self.mean) / self.std
        return self.network(images.expand(-1, 3, -1, -1) if self.grey_to_colour else images)


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    mean: Sequence[float] | Tensor = (0.0,),
    std: Sequence[float] | Tensor = (1.0,),
) -> OnPixels:
    """Build the model that `--model` names, on the CPU, and try it on one image.

    Args:
        name: a built-in name; `timm:` and a name of timm's; or `package.module:callable`, which is
            called with `num_classes` where it has such a parameter.
        image_shape: (channels, height, width) of the images. Grey ones are repeated three times
            for a model that takes three channels.
        classes: number of outputs wanted.
        mean: of the pixels, per channel.
        std: likewise the standard deviation.

    Raises:
        UsageError: the name leads to no model, or the model does not map (1, *image_shape) to
            at least (1, classes), or has nothing to train.

    >>> model = build_model("cnn", (1, 28, 28), classes=10, mean=[73.0], std=[90.0])
    >>> model(torch.full((2, 1, 28, 28), 255, dtype=torch.uint8)).shape
    torch.Size([2, 10])
    """
    try:
        network = _find(name, image_shape, classes)
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise UsageError("it has no parameter that requires grad: nothing to train")
        convolution = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
        colour = convolution is not None and convolution.in_channels == 3 and image_shape[0] == 1
        model = OnPixels(network, torch.as_tensor(mean), torch.as_tensor(std), colour)
        _try(model, (1, *image_shape), classes)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from error
    return model


def _find(name: str, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    if name in BUILT_IN:
        return BUILT_IN[name](image_shape, classes)
    place, colon, attribute = name.partition(":")
    if not (place and colon and attribute):
        raise UsageError(
            f"neither built in ({', '.join(BUILT_IN)}) nor timm:NAME nor package.module:callable"
        )
    if place == "timm":
        found: Any = _of_timm(attribute, image_shape)
    else:
        try:
            found = importlib.import_module(place)
        except Exception as error:
            words = f"{type(error).__name__}: {words_of(error)}"
            raise UsageError(f"cannot import {place}: {words}") from error
        try:
            for part in attribute.split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise UsageError(f"{place} has no {attribute}") from error
    if not callable(found):
        raise UsageError(f"{attribute} is a {type(found).__name__}, not callable")
    try:
        model = found(**({"num_classes": classes} if _takes_num_classes(found) else {}))
    except Exception as error:
        words = f"{type(error).__name__}: {words_of(error)}"
        raise UsageError(f"calling it failed: {words}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"it returned a {type(model).__name__}, not an nn.Module")
    return model


def _of_timm(name: str, image_shape: tuple[int, int, int]) -> Callable[..., Any]:
    """What makes a model of timm's for the images' channels, and their size where it has one."""
    create = import_timm("models").create_model

    def make(num_classes: int) -> Any:
        options = {"num_classes": num_classes, "in_chans": image_shape[0]}
        try:
            return create(name, img_size=image_shape[1:], **options)
        except TypeError:  # a convolutional network takes any size
            return create(name, **options)

    return make


def _takes_num_classes(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a callable written in C has no signature
        return False
    return any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)


@torch.no_grad()
def _try(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    model.eval()
    try:
        scores = model(torch.zeros(shape, dtype=torch.uint8))
    except Exception as error:
        words = f"{type(error).__name__}: {words_of(error)}"
        raise UsageError(f"it cannot take images {shape}: {words}") from error
    model.train()
    if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape[1] < classes:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise UsageError(
            f"it makes {found} of one image, but (1, {classes}) is expected: a score for each class"
        )


def initialise(model: nn.Module, path: Path) -> str:
    """Copy into a model what a file holds for it; return a line that says what was done.

    A head for another number of classes differs in its shape, and stays as it was initialised.
    So does what the file lacks.

    Args:
        model: changed in place.
        path: a state dict saved by `torch.save`, as it is or under `"model"` or `"state_dict"`,
            or a checkpoint of this tool.

    Raises:
        UsageError: the file cannot be read, or nothing in it fits.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"--init {path} cannot be read: {words_of(error):.200}") from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise UsageError(f"--init {path} holds a {type(content).__name__}, not a state dict")
    wanted = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    found = {_bare(str(n), wanted): x for n, x in content.items() if isinstance(x, Tensor)}
    fitting = {n: x for n, x in found.items() if n in wanted and x.shape == wanted[n].shape}
    if not any(name in fitting for name, _ in model.named_parameters()):
        raise UsageError(
            f"--init {path}: nothing in it fits the model; it has {_list(found)}, the model has "
            f"{_list(wanted)}"
        )
    model.load_state_dict(fitting, strict=False)
    words = f"initialised from {path}: {len(fitting)} of {len(wanted)} tensors"
    for told, names in (("loaded", wanted), ("used", found)):
        if left := [name for name in names if name not in fitting]:
            words += f"; not {told}: {_list(left)}"
    return words


def _bare(name: str, wanted: dict[str, Tensor]) -> str:
    """Take off what wrappers put before a name, unless the model has it so."""
    for prefix in ("module.", "_orig_mod.", "network."):
        if name not in wanted:
            name = name.removeprefix(prefix)
    return name


def _list(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more if names else "none"
