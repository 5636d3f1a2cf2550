"""The built-in network, and from the name of a model to one that takes the data's images."""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.data import UsageError, words_of
from scatterpar.train.pictures import import_timm

BUILT_IN = "cnn"
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # what these put before a name


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
        if min(height, width) < 8:
            raise UsageError(
                f"cnn takes images of 8 x 8 pixels or more, but these are {height} x {width}"
            )
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


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


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
        if images.shape[1] > len(self.mean) == 1:  # coloured ones, for a model of grey images
            images = images.float().mean(1, keepdim=True).round_()
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
        name: `cnn`; `timm:` and a name of timm's; or `package.module:callable`, which is
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
    if name == BUILT_IN:
        return SmallCNN(image_shape, classes)
    place, _, attribute = name.partition(":")
    if not (place and attribute):
        raise UsageError(f"neither {BUILT_IN} nor timm:NAME nor package.module:callable")
    try:
        if place == "timm":
            model = _of_timm(attribute, image_shape, classes)
        else:
            factory = operator.attrgetter(attribute)(importlib.import_module(place))
            takes = _takes_num_classes(factory)
            model = factory(**({"num_classes": classes} if takes else {}))
    except UsageError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {words_of(error)}"
        raise UsageError(f"importing and calling it failed: {words}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"it returned a {type(model).__name__}, not an nn.Module")
    return model


def _of_timm(name: str, image_shape: tuple[int, int, int], classes: int) -> Any:
    """Make a model of timm's for the images' channels, and their size where it has one."""
    create = import_timm("models").create_model
    options = {"num_classes": classes, "in_chans": image_shape[0]}
    try:
        return create(name, img_size=image_shape[1:], **options)
    except TypeError:  # a convolutional network takes any size
        return create(name, **options)


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


def initialise(model: nn.Module, path: Path) -> None:
    """Copy into a model what a state dict or checkpoint has for it, in names and shapes.

    Raises:
        UsageError: the file cannot be read, or nothing in it fits.
    """
    wanted = model.state_dict()
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        content = content.get("model", content.get("state_dict", content))
        found = {_WRAPPERS.sub("", name): value for name, value in content.items()} | content
        fitting = {n: x for n, x in found.items() if n in wanted and x.shape == wanted[n].shape}
    except Exception as error:
        raise UsageError(f"--init {path} cannot be read: {words_of(error):.200}") from error
    if not fitting:
        raise UsageError(
            f"--init {path}: nothing in it fits the model; it has {_list(found)}, the model has "
            f"{_list(wanted)}"
        )
    model.load_state_dict(fitting, strict=False)


def _list(names: Iterable[str]) -> str:
    return ", ".join([*names][:3]) + " …"
