"""The built-in network, and building the model that `--model` names for the data's images."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.data import UsageError, words_of
from scatterpar.train.pictures import OTHER_BUILD, library

BUILT_IN = "cnn"
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # prefixes of DataParallel, torch.compile


class SmallCNN(nn.Sequential):
    """Three convolutions and a hidden layer, with batch normalisation: small enough for two cores.

    Maps float32 (rows, channels, height, width), the sides at least 8, to (rows, classes).

    >>> import torch
    >>> SmallCNN((1, 28, 28), classes=10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape
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
    """Standardises pixels from 0 to 255 for a network, on the device.

    So bytes are copied to the devices, a quarter of the traffic of floating-point numbers. The
    network has its own state dict. Grey images are repeated for a network that takes coloured ones;
    coloured images are averaged for a network that takes grey ones.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        first = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
        self.takes_colour = first is not None and first.in_channels == 3
        self.register_buffer("mean", mean.float().view(-1, 1, 1), persistent=False)
        self.register_buffer("std", std.float().view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Any:
        """Compute the network's output for pixels: (rows, channels, height, width)."""
        if images.shape[1] > len(self.mean) == 1:
            images = images.float().mean(1, keepdim=True).round_()
        images = (images - self.mean) / self.std
        return self.network(images.expand(-1, 3, -1, -1) if self.takes_colour else images)


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    mean: Sequence[float] | Tensor = (0.0,),
    std: Sequence[float] | Tensor = (1.0,),
    pretrained: bool = False,
) -> OnPixels:
    """Build the model that `--model` names, on the CPU, and test it with one image.

    With `pretrained` it has timm's weights, and uses the mean and deviation of their training data.

    >>> model = build_model("cnn", (1, 28, 28), classes=10, mean=[73.0], std=[90.0])
    >>> model(torch.full((2, 1, 28, 28), 255, dtype=torch.uint8)).shape
    torch.Size([2, 10])
    """
    try:
        network = _find(name, image_shape, classes, pretrained)
        if pretrained:
            made: Any = network.pretrained_cfg  # for grey images the channels are averaged
            mean, std = (
                255 * torch.tensor(made[key]).view(image_shape[0], -1).mean(1)
                for key in ("mean", "std")
            )
        model = OnPixels(network, torch.as_tensor(mean), torch.as_tensor(std))
        with torch.no_grad():
            scores = model.eval()(torch.zeros(1, *image_shape, dtype=torch.uint8))
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from error
    except Exception as error:
        words = f"{type(error).__name__}: {words_of(error)}"
        words += f" ({OTHER_BUILD})" if "torchvision::" in words else ""
        raise UsageError(f"--model {name} and an image {image_shape}: {words}") from error
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape[1] < classes:
        raise UsageError(
            f"--model {name}: it should make a score for each of {classes} classes, but makes "
            f"{shape} of one image"
        )
    return model.train()


def _find(
    name: str, image_shape: tuple[int, int, int], classes: int, pretrained: bool
) -> nn.Module:
    place, _, attribute = name.partition(":")
    if pretrained and place != "timm":
        raise UsageError("--pretrained is for timm:NAME; --init FILE takes the weights of others")
    if name == BUILT_IN:
        return SmallCNN(image_shape, classes)
    if not (place and attribute):
        raise UsageError(
            f"neither {BUILT_IN} nor timm:NAME nor package.module:callable; "
            f"did you mean timm:{name}?"
        )
    if place == "timm":
        create = functools.partial(library("timm.models").create_model, attribute)
        options = {"num_classes": classes, "in_chans": image_shape[0], "pretrained": pretrained}
        try:
            model: nn.Module = create(img_size=image_shape[1:], **options)
        except TypeError:  # a convolutional network takes any size
            model = create(**options)
        return model
    find_module = library if place.startswith("torchvision") else importlib.import_module
    factory = operator.attrgetter(attribute)(find_module(place))
    with contextlib.suppress(ValueError):  # a callable written in C has no signature
        parameters = inspect.signature(factory).parameters.values()
        if any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters):
            factory = functools.partial(factory, num_classes=classes)
    return factory()  # type: ignore[no-any-return]


def initialise(model: nn.Module, path: Path) -> None:
    """Load the values of a state dict or checkpoint whose names and shapes fit the model."""
    state = model.state_dict()
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        content = content.get("model", content.get("state_dict", content))
        values = {_WRAPPERS.sub("", name): value for name, value in content.items()} | content
        fitting = {n: x for n, x in values.items() if n in state and x.shape == state[n].shape}
    except Exception as error:
        raise UsageError(f"--init {path} cannot be read: {words_of(error):.200}") from error
    if not fitting:
        names = f"it has {next(iter(values), None)} …, the model has {next(iter(state), None)} …"
        raise UsageError(f"--init {path}: nothing in it fits the model; {names}")
    model.load_state_dict(fitting, strict=False)
