"""From the name given on the command line to a model that takes the data's images."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.errors import UsageError
from scatterpar.train.models import ResNet20, SmallCNN

BUILT_IN = {"cnn": SmallCNN, "resnet20": ResNet20}


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    mean: Sequence[float] | Tensor = (0.0,),
    std: Sequence[float] | Tensor = (1.0,),
) -> OnPixels:
    """Build the model that `--model` names, on the CPU, and try it on one image.

    A model from elsewhere is called with `num_classes` where it has such a parameter. One that
    takes three channels gets grey images repeated three times.

    Args:
        name: a built-in name, or `package.module:callable`.
        image_shape: (channels, height, width) of the images.
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
    if name in BUILT_IN:
        network: nn.Module = BUILT_IN[name](image_shape, classes)
        grey_to_colour = False
    else:
        network = _call(name, _import(name), classes)
        grey_to_colour = image_shape[0] == 1 and _channels_taken(network) == 3
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UsageError(f"--model {name} has no parameter that requires grad: nothing to train")
    model = OnPixels(network, torch.as_tensor(mean), torch.as_tensor(std), grey_to_colour)
    _try(name, model, image_shape, classes)
    return model


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


def _import(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(
            f"--model {name}: neither built in ({', '.join(BUILT_IN)}) nor package.module:callable"
        )
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"--model {name}: cannot import {module_name}: {_words(error)}") from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise UsageError(f"--model {name}: {module_name} has no {attribute}") from error
    if not callable(found):
        raise UsageError(f"--model {name}: {attribute} is a {type(found).__name__}, not callable")
    return found


def _call(name: str, factory: Callable[..., Any], classes: int) -> nn.Module:
    options = {"num_classes": classes} if _takes_num_classes(factory) else {}
    try:
        model = factory(**options)
    except Exception as error:
        raise UsageError(f"--model {name}: calling it failed: {_words(error)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned a {type(model).__name__}, not an nn.Module")
    return model


def _takes_num_classes(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a callable written in C has no signature
        return False
    return any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)


def _channels_taken(model: nn.Module) -> int | None:
    convolutions = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    first = next(convolutions, None)
    return None if first is None else first.in_channels


def _try(name: str, model: nn.Module, image_shape: tuple[int, int, int], classes: int) -> None:
    shape = (1, *image_shape)
    model.eval()
    try:
        with torch.no_grad():
            scores = model(torch.zeros(shape, dtype=torch.uint8))
    except Exception as error:
        raise UsageError(f"--model {name} cannot take images {shape}: {_words(error)}") from error
    model.train()
    if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape[1] < classes:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise UsageError(
            f"--model {name} makes {found} of one image, but (1, {classes}) is expected: "
            "a score for each class"
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
