"""The built-in network, and building the model that `--model` names for the data's images."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.data import OTHER_BUILD, library
from scatterpar.train.options import UsageError, words_of

BUILT_IN = "cnn"


class SmallCNN(nn.Sequential):
    """Three convolutions and a hidden layer, with batch normalisation: small enough for two cores.

    Maps float32 (rows, channels, height, width), the sides at least 8, to (rows, classes).
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        channels, height, width = image_shape
        convolutions = [
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                *(nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)),
            )
            for before, after in ((channels, 16), (16, 32), (32, 64))
        ]
        hidden = nn.Linear(64 * (height // 8) * (width // 8), 128, bias=False)
        head = hidden, nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, classes)
        super().__init__(*convolutions, nn.Flatten(), *head)


class OnPixels(nn.Module):
    """Standardises pixels from 0 to 255 for a network, on the device: bytes are copied there.

    Grey images are repeated for a network that takes coloured ones; coloured images are averaged
    for a network that takes grey ones.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Any, std: Any) -> None:
        super().__init__()
        self.network = network
        first = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
        self.takes_colour = first is not None and first.in_channels == 3
        for name, value in (("mean", mean), ("std", std)):
            value = torch.as_tensor(value, dtype=torch.float32).view(-1, 1, 1)
            self.register_buffer(name, value, persistent=False)

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
    mean: Any = 0.0,
    std: Any = 1.0,
    pretrained: bool = False,
) -> OnPixels:
    """Build the model that `--model` names, on the CPU, and test it with one image.

    With `pretrained` it has timm's weights, and uses the mean and deviation of their training data.
    """
    try:
        network = _find(name, image_shape, classes, pretrained)
        if pretrained:
            made: Any = network.pretrained_cfg  # for grey images the channels are averaged
            mean, std = (
                255 * torch.tensor(made[key]).view(image_shape[0], -1).mean(1)
                for key in ("mean", "std")
            )
        model = OnPixels(network, mean, std)
        with torch.no_grad():
            scores = model.eval()(torch.zeros(1, *image_shape, dtype=torch.uint8))
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape[1] < classes:
            wanted = f"a score for each of {classes} classes"
            raise UsageError(f"it should make {wanted}, but makes {shape} of one image")
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from error
    except Exception as error:
        words = f"{type(error).__name__}: {words_of(error)}"
        words += f" ({OTHER_BUILD})" if "torchvision::" in words else ""
        raise UsageError(f"--model {name} and an image {image_shape}: {words}") from error
    return model.train()


def _find(name: str, image_shape: tuple[int, int, int], classes: int, pretrained: bool) -> Any:
    place, _, attribute = name.partition(":")
    if pretrained and place != "timm":
        raise UsageError("--pretrained is for timm:NAME")
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
            return create(img_size=image_shape[1:], **options)
        except TypeError:  # a convolutional network takes any size
            return create(**options)
    find_module = library if place.startswith("torchvision") else importlib.import_module
    factory = operator.attrgetter(attribute)(find_module(place))
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a callable written in C has no signature
        return factory()
    counts = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
    return factory(num_classes=classes) if counts else factory()
