"""The models that `--model` names, their initial weights, and those of a run."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.command_line import Options, UsageError, words_of
from scatterpar.train.data import ImageShape, Source
from scatterpar.train.libraries import (
    library,
    stay_offline_without_network,
    suggestion,
)
from scatterpar.train.pictures import read_picture
from scatterpar.train.records import BEST_FILE, load

BUILT_IN = "cnn"
_KNOWN = (BUILT_IN, "torchvision.models", "timm")  # code that `load_model` may call
_TORCHVISION = "torchvision.models:"


class SmallCNN(nn.Sequential):
    """Three convolutions and a hidden layer, with batch normalisation, for sides of at
    least 8.
    """

    def __init__(self, image_shape: ImageShape, classes: int) -> None:
        channels, height, width = image_shape
        super().__init__()
        for outputs in (16, 32, 64):
            # Without a bias: the normalisation would subtract it.
            self.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
            self.append(nn.BatchNorm2d(outputs))
            self.append(nn.ReLU())
            self.append(nn.MaxPool2d(2))
            channels = outputs
        self.append(nn.Flatten())
        places = (height // 8) * (width // 8)
        self.append(nn.Linear(channels * places, 128, bias=False))
        self.append(nn.BatchNorm1d(128))
        self.append(nn.ReLU())
        self.append(nn.Linear(128, classes))


class OnPixels(nn.Module):
    """Standardises pixels from 0 to 255 for a network, on the device: bytes are copied
    there.

    Grey images are repeated for a network that takes coloured ones; coloured images are
    averaged for a network that takes grey ones. Of a network with several outputs the
    first one counts, as of torchvision's GoogLeNet in training.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Any, std: Any) -> None:
        super().__init__()
        self.network = network
        self.takes_colour = _input_channels(network) == 3
        for name, values in (("mean", mean), ("std", std)):
            # A copy: the values may be those of all sources of images.
            per_channel = torch.as_tensor(values, dtype=torch.float32).clone()
            # Not among the weights: those in best.pt fit the network alone.
            self.register_buffer(name, per_channel.view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Any:
        """Compute the network's output for pixels: (rows, channels, height, width).

        Raises a `TypeError` if they are no bytes, whose range is known.
        """
        if images.dtype != torch.uint8:
            raise TypeError(
                f"images: {images.dtype}, and the model takes bytes (torch.uint8) from "
                "0 to 255, which it standardises; read files with about['transform'], "
                "or convert floats from 0 to 1 by (255 * images).round().byte()"
            )
        # Pictures in files are coloured, also for a model of the included images.
        if images.shape[1] > len(self.mean) == 1:
            # To whole levels, as the model has seen them.
            images = images.float().mean(1, keepdim=True).round_()
        images = (images - self.mean) / self.std
        if self.takes_colour:
            images = images.expand(-1, 3, -1, -1)
        outputs = self.network(images)
        return outputs[0] if isinstance(outputs, tuple) else outputs


def _input_channels(network: nn.Module) -> int | None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    return None


def build_model(
    name: str,
    shape: ImageShape,
    classes: int,
    mean: Any = 0,
    std: Any = 1,
    pretrained: bool = False,
) -> OnPixels:
    """Build the model that `--model` names, on the CPU, and try it on one image.

    With `pretrained` it has its library's weights, and standardises pixels as the
    library did for them. Raises a `UsageError` if there is no such model, or no such
    weights.
    """
    with _named_in_errors(name, shape):
        network = _find_network(name, shape, classes, pretrained)
        if pretrained and getattr(network, "pretrained_cfg", None):
            mean, std = _statistics_of_weights(network.pretrained_cfg, shape)
        model = OnPixels(network, mean, std)
        # Lazy layers get their shapes. In eval mode, because one row has no statistics.
        _try(model.eval(), shape, classes, rows=1)
    return model.train()


def start_model(options: Options, source: Source) -> OnPixels:
    """Build the model of a new run with its initial weights, and try a training step's
    forward pass. The notes of the source get a line about its weights.
    """
    name = options.model
    shape = source.image_shape
    classes = len(source.class_names)
    if options.pretrained and options.weights is not None:
        raise UsageError("--pretrained and --weights exclude each other")
    model = build_model(
        name, shape, classes, source.mean, source.std, options.pretrained
    )
    with _named_in_errors(name, shape):
        if options.pretrained:
            _start_from_zero(model, classes)
            source.notes.append(f"{name} starts from its library's weights")
        if options.weights is not None:
            line = _load_weights(model, classes, shape, options.weights)
            source.notes.append(line)
        outputs = _training_outputs(model, shape, classes)
    if isinstance(outputs, tuple):
        source.notes.append(
            f"warning: in training {name} has {len(outputs)} outputs "
            f"({type(outputs).__name__}), and the first one is trained alone"
        )
    return model


@contextlib.contextmanager
def _named_in_errors(name: str, shape: ImageShape) -> Iterator[None]:
    """Turn an error in the body into a `UsageError` that names the model and the size
    of the images.
    """
    try:
        yield
    except Exception as error:  # of anybody's network
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        size = f"with an image {shape}"
        if shape[0] == 3:  # in files
            size += "; --image-size N sets its side"
        raise UsageError(f"--model {name}: {kind}{words_of(error)} ({size})") from error


def _training_outputs(model: OnPixels, shape: ImageShape, classes: int) -> Any:
    """Compute two images in training mode, in which a network may have other outputs
    and smallest sizes. Returns what the network returned.
    """
    outputs = []
    hook = model.network.register_forward_hook(lambda *call: outputs.append(call[2]))
    # Running statistics.
    saved = copy.deepcopy(model.state_dict())
    _try(model, shape, classes, rows=2)
    model.load_state_dict(saved)
    hook.remove()
    return outputs[-1]


@torch.no_grad()
def _try(model: OnPixels, shape: ImageShape, classes: int, rows: int) -> None:
    """Compute black images: an error comes now, not after the first batch was read."""
    scores = model(torch.zeros(rows, *shape, dtype=torch.uint8))
    if not isinstance(scores, Tensor):
        raise UsageError(
            f"it should return a tensor of scores, and returns {type(scores).__name__}"
        )
    # More scores than classes are fine: a function may know no number of classes.
    if scores.ndim != 2 or scores.shape[1] < classes:
        raise UsageError(
            f"it should make a score for each of {classes} classes; of {rows} images "
            f"it makes {tuple(scores.shape)}"
        )


def _start_from_zero(model: OnPixels, classes: int) -> None:
    """Let the layers that make the scores start from zero.

    Random weights would send a large random gradient through the layers before them,
    in the first steps (as in the fine-tuning of arXiv:2010.11929, B.1.1).
    """
    for layer in head_of(model, classes):
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)


def _load_weights(model: OnPixels, classes: int, shape: ImageShape, path: Path) -> str:
    """Load a file of weights, except those of the last layer if they are for other
    classes. Returns a line about it.
    """
    if not path.is_file():
        raise UsageError(f"--weights: there is no file {path}")
    try:
        state = library("timm.models").load_state_dict(str(path))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--weights: {path} cannot be read: {words_of(error):.200}"
        ) from error
    own = model.network.state_dict()
    fitting = {}
    if isinstance(state, Mapping):
        for name, value in state.items():
            if name in own and getattr(value, "shape", None) == own[name].shape:
                fitting[name] = value
    head = set[str]()
    for layer in head_of(model, classes):
        prefix = next(
            key for key, part in model.network.named_modules() if part is layer
        )
        head |= {f"{prefix}.{name}" for name in layer.state_dict()}
    absent = [name for name in own if name not in fitting]
    strange = [name for name in absent if name not in head]
    if strange:
        raise UsageError(
            f"--weights: {path} lacks {len(strange)} of the {len(own)} tensors of this "
            f"network, or they have other shapes; the first one is {strange[0]}"
        )
    if absent:
        _start_from_zero(model, classes)
    model.network.load_state_dict(fitting, strict=False)
    config = getattr(model.network, "pretrained_cfg", None)
    if config:
        mean, std = _statistics_of_weights(config, shape)
        model.mean.copy_(mean.view(-1, 1, 1))
        model.std.copy_(std.view(-1, 1, 1))
    line = f"starts from the weights in {path}"
    return f"{line}, except {', '.join(absent)}, which are zero" if absent else line


def _statistics_of_weights(config: Any, shape: ImageShape) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the pixels that a library's weights were made
    with.
    """
    statistics = torch.tensor([config["mean"], config["std"]])
    # The channels are averaged for grey images.
    mean, std = 255 * statistics.view(2, shape[0], -1).mean(2)
    return mean, std


def head_of(model: OnPixels, classes: int) -> list[nn.Module]:
    """Return the layers that make the scores: those that timm names, or the last one
    with an output per class.
    """
    network: Any = model.network
    if hasattr(network, "get_classifier"):
        heads = network.get_classifier()
        # Distilled models have two.
        return list(heads) if isinstance(heads, tuple) else [heads]
    last = None
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and len(module.weight) == classes:
            last = module
    if last is None:
        raise UsageError(
            f"the model has no layer with {classes} outputs, one per class, that could "
            "start anew"
        )
    return [last]


def _find_network(name: str, shape: ImageShape, classes: int, pretrained: bool) -> Any:
    place, _, attribute = name.partition(":")
    if name == BUILT_IN:
        if pretrained:
            raise UsageError(
                f"--pretrained is for timm:NAME and {_TORCHVISION}NAME; --weights FILE "
                "loads a file"
            )
        return SmallCNN(shape, classes)
    if not (place and attribute):
        raise UsageError(
            f"neither {BUILT_IN} nor timm:NAME nor package.module:callable"
            f"{_near_model(name)}"
        )
    if place == "timm":
        return _create_timm_model(attribute, shape, classes, pretrained)
    if pretrained and name.startswith(_TORCHVISION):
        return _pretrained_of_torchvision(attribute, classes)
    if place.startswith("torchvision"):
        library("torchvision.models")  # even if it was built for another torch
    try:
        factory = operator.attrgetter(attribute)(importlib.import_module(place))
    except (ModuleNotFoundError, AttributeError) as error:
        module = sys.modules.get(place)
        near = _near_model(name)
        if module is not None and not name.startswith(_TORCHVISION):
            near = suggestion(attribute, vars(module), f"{place}:") or near
        raise UsageError(f"{words_of(error)}{near}") from error
    keywords: dict[str, Any] = {}
    if pretrained:
        if not _has_parameter(factory, "pretrained"):
            raise UsageError(
                f"--pretrained is for timm:NAME, {_TORCHVISION}NAME, and functions "
                "with a parameter `pretrained`; --weights FILE loads a file"
            )
        keywords["pretrained"] = True
    if _has_parameter(factory, "num_classes"):
        keywords["num_classes"] = classes
    return factory(**keywords)


def _has_parameter(factory: Any, name: str) -> bool:
    try:
        inspect.signature(factory).bind_partial(**{name: None})
    except TypeError:
        return False
    return True


def _near_model(name: str) -> str:
    """Return a hint with the models that have similar names."""
    known = [BUILT_IN]
    # Each library has names that the other lacks, such as torchvision's vit_b_16.
    with contextlib.suppress(UsageError):  # the libraries are not installed
        known += [f"timm:{model}" for model in library("timm.models").list_models()]
        models = library("torchvision.models")
        known += [f"{_TORCHVISION}{model}" for model in models.list_models(models)]
    return suggestion(name, known)


def _create_timm_model(
    name: str, shape: ImageShape, classes: int, pretrained: bool
) -> nn.Module:
    models = library("timm.models")
    base_name = name.partition(".")[0]  # without the tag of its weights
    is_elsewhere = ":" in name or "/" in name  # as hf-hub:owner/name
    if not is_elsewhere and not models.is_model(base_name):
        raise UsageError(f"timm has no model {name}{_near_model(base_name)}")
    create = functools.partial(
        models.create_model,
        name,
        num_classes=classes,
        in_chans=shape[0],
        pretrained=pretrained,
    )
    if pretrained:
        stay_offline_without_network()
    try:
        network: nn.Module = create(img_size=shape[1:])
    except TypeError:  # a convolutional network takes any size
        network = create()
    return network


def _pretrained_of_torchvision(name: str, classes: int) -> nn.Module:
    """Build torchvision's model with its weights, except those of the last layer."""
    models = library("torchvision.models")
    if name not in models.list_models():
        raise UsageError(f"torchvision has no weights for {name}{_near_model(name)}")
    weights = models.get_model_weights(name).DEFAULT
    # Not by the model's own `weights=`, which insists on ImageNet's 1000 classes.
    state = weights.get_state_dict(progress=False)
    network: Any = models.get_model(name, num_classes=classes)
    fitting = {}
    for key, value in network.state_dict().items():
        if key in state and state[key].shape == value.shape:
            fitting[key] = state[key]
    network.load_state_dict(fitting, strict=False)
    transforms = weights.transforms()
    # As timm's networks have it.
    network.pretrained_cfg = {"mean": transforms.mean, "std": transforms.std}
    return network  # type: ignore[no-any-return]


def load_model(
    path: str | Path, model: str | None = None
) -> tuple[OnPixels, dict[str, Any]]:
    """Load the model of a run, on the CPU and in eval mode, with the weights that the
    run would test.

    Returns the model, which takes images as bytes: uint8, (rows, channels, height,
    width); and a dict. Its ``transform`` turns a file, or a picture of Pillow, into
    such an image, and its ``class_names`` are the columns of the scores.

    Args:
        path: the folder of a run, of which ``best.pt`` is loaded, or a checkpoint.
        model: the name of the checkpoint's model, if it is code from elsewhere that may
            be called.
    """
    path = Path(path)
    if path.is_dir():
        path = path / BEST_FILE
    state = load(path)
    about = state["about"]
    name = about["model"]
    # A checkpoint from elsewhere must not choose which code is called.
    if name != model and name.partition(":")[0] not in _KNOWN:
        raise UsageError(
            f"{path} is of --model {name}, which is code from elsewhere: give --model "
            f"{name} if it may be called"
        )
    channels, height, width = about["image_shape"]
    shape = channels, height, width
    classes = len(about["class_names"])
    built = build_model(name, shape, classes, about["mean"], about["std"])
    if state.get("average"):
        raise UsageError(
            f"{path} has weights before and after --ema: name the run's folder, whose "
            f"{BEST_FILE} has those that were tested"
        )
    try:
        built.network.load_state_dict(state["model"])
    except RuntimeError as error:
        message = f"{words_of(error):.200}"
        raise UsageError(f"{path} does not fit {name}: {message}") from error
    about["transform"] = functools.partial(read_picture, size=height)
    return built.eval(), about
