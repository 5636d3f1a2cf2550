"""From the name given on the command line to a model that takes the data's images."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.errors import UsageError
from scatterpar.train.models import ResNet20, SmallCNN

BUILT_IN = {"cnn": SmallCNN, "resnet20": ResNet20}


def build_model(name: str, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the model that `--model` names, on the CPU, and try it on one image.

    A model from elsewhere is called with `num_classes` where it has such a parameter. One that
    takes three channels gets grey images repeated three times.

    Args:
        name: a built-in name, or `package.module:callable`.
        image_shape: (channels, height, width) of the images.
        classes: number of outputs wanted.

    Raises:
        UsageError: the name leads to no model, or the model does not map (1, *image_shape) to
            at least (1, classes), or has nothing to train.

    >>> type(build_model("cnn", (1, 28, 28), classes=10)).__name__
    'SmallCNN'
    """
    if name in BUILT_IN:
        model: nn.Module = BUILT_IN[name](image_shape, classes)
    else:
        model = _call(name, _import(name), classes)
        if image_shape[0] == 1 and _channels_taken(model) == 3:
            model = GreyToColour(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"--model {name} has no parameter that requires grad: nothing to train")
    _try(name, model, image_shape, classes)
    return model


class GreyToColour(nn.Module):
    """Repeat the one channel of grey images for a model that takes three."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        """Compute the model's output for (rows, 1, height, width)."""
        return self.model(images.expand(-1, 3, -1, -1))


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
            scores = model(torch.zeros(shape))
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
