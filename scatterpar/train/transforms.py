"""From a decoded picture to a square of pixels: augmented for training, plain for testing.

The settings are those of torchvision's own reference scripts, and the transforms are
`torchvision.transforms.v2`. Where torchvision does not import, the two that most runs need
(random crop with flip, centre crop) are made with Pillow: the same random numbers in the same
order give the same pixels, which the tests compare where torchvision is there. All random
numbers are drawn from torch's CPU generator.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scatterpar.train.errors import UsageError

Transform = Callable[[Any], Tensor]
IMAGENET_MEAN = (123.675, 116.28, 103.53)  # of 0 to 255; torchvision's, for models trained there
IMAGENET_STD = (58.395, 57.12, 57.375)
_SMALL = 128  # pixels; below, images are usually made at that size, and have no edges to spare
_RATIOS = (3 / 4, 4 / 3)
_TRIES = 10


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied.

    Attributes:
        kind: `none`; `crop`: random crop and flip (Szegedy et al. 2014, arXiv:1409.4842);
            `trivial` (Müller and Hutter 2021, arXiv:2103.10158) or `rand` (Cubuk et al. 2019,
            arXiv:1909.13719): those after it.
        smallest_crop: smallest part of an image's area that a random crop shows.
        erase: how often a rectangle is erased (Zhong et al. 2017, arXiv:1708.04896).
        mixup: alpha of mixup (Zhang et al. 2017, arXiv:1710.09412); 0 for none.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv:1905.04899); 0 for none.
    """

    kind: str = "crop"
    smallest_crop: float = 0.08
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def needs_torchvision(self) -> bool:
        """Whether Pillow alone cannot do it."""
        return self.kind in ("trivial", "rand") or max(self.erase, self.mixup, self.cutmix) > 0


@functools.cache
def torchvision_transforms() -> Any:
    """Return `torchvision.transforms.v2`, or None where it does not import."""
    try:
        return importlib.import_module("torchvision.transforms.v2")
    except Exception:  # beside a torch that it was not built for: a RuntimeError
        return None


def for_training(size: int, augmentation: Augmentation) -> Transform:
    """Make the transform of training pictures to uint8 (3, size, size).

    Raises:
        UsageError: torchvision is needed, and does not import.
    """
    v2 = torchvision_transforms()
    if v2 is None and augmentation.needs_torchvision:  # first: mixing needs it without a crop too
        raise UsageError(
            "--augment trivial and rand, --erase, --mixup and --cutmix need torchvision, which "
            "does not import here: pip install scatterpar[images]"
        )
    if augmentation.kind == "none" and not augmentation.erase:
        return for_testing(size)
    if v2 is None:
        return RandomCrop(size, augmentation.smallest_crop)
    if augmentation.kind == "none":
        steps = [v2.Resize(resized(size)), v2.CenterCrop(size)]
    else:
        scale = (augmentation.smallest_crop, 1.0)
        steps = [v2.RandomResizedCrop(size, scale, antialias=True), v2.RandomHorizontalFlip()]
    if augmentation.kind == "trivial":
        steps.append(v2.TrivialAugmentWide())
    elif augmentation.kind == "rand":
        steps.append(v2.RandAugment())
    steps.append(v2.PILToTensor())
    if augmentation.erase:
        grey = [round(value) for value in IMAGENET_MEAN]  # zero once it is standardised
        steps.append(v2.RandomErasing(augmentation.erase, value=grey))
    transform: Transform = v2.Compose(steps)
    return transform


def for_testing(size: int) -> Transform:
    """Make the transform of test pictures: the middle, as uint8 (3, size, size)."""
    return CentreCrop(size)


def for_batches(augmentation: Augmentation, classes: int) -> Any:
    """Return what mixes images and labels of a piece with each other, or None."""
    v2 = torchvision_transforms()
    choices = []
    if augmentation.mixup:
        choices.append(v2.MixUp(alpha=augmentation.mixup, num_classes=classes))
    if augmentation.cutmix:
        choices.append(v2.CutMix(alpha=augmentation.cutmix, num_classes=classes))
    return v2.RandomChoice(choices) if choices else None


def resized(size: int) -> int:
    """Return what the shorter side is brought to before the middle is cut out: 256 for 224."""
    return size if size < _SMALL else round(size * 8 / 7)


def pixels(image: Any) -> Tensor:
    """Turn a PIL image in RGB into uint8 (3, height, width)."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


class CentreCrop:
    """Bring the shorter side to `resized(size)`, and cut out the middle."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Tensor:
        """Transform a PIL image."""
        short, target = min(image.size), resized(self.size)
        if short != target:
            width, height = (int(target * side / short) for side in image.size)
            image = image.resize((width, height), _bilinear())
        left, top = (round((side - self.size) / 2) for side in image.size)
        return pixels(image.crop((left, top, left + self.size, top + self.size)))


class RandomCrop:
    """A random part of the image at a random shape, and half of the time its mirror image.

    The area is uniform in `(smallest, 1)` of the image's, the logarithm of the ratio of the
    sides uniform up to 3:4 and 4:3; where ten such parts do not fit, the largest middle that
    has an allowed shape.
    """

    def __init__(self, size: int, smallest: float) -> None:
        self.size = size
        self.smallest = smallest

    def __call__(self, image: Any) -> Tensor:
        """Transform a PIL image."""
        image = image.crop(self._box(*image.size)).resize((self.size, self.size), _bilinear())
        found = pixels(image)
        return found.flip(2) if float(torch.rand(1)) < 0.5 else found

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        logarithms = torch.log(torch.tensor(_RATIOS)).tolist()
        for _ in range(_TRIES):
            area = width * height * _uniform(self.smallest, 1.0)
            ratio = float(torch.exp(torch.empty(1).uniform_(*logarithms)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = _below(height - h + 1), _below(width - w + 1)
                return left, top, left + w, top + h
        w = min(width, round(height * _RATIOS[1]))
        h = min(height, round(width / _RATIOS[0]))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def _uniform(low: float, high: float) -> float:
    return float(torch.empty(1).uniform_(low, high))


def _below(limit: int) -> int:
    return int(torch.randint(0, limit, (1,)))


def _bilinear() -> Any:
    from PIL import Image

    return Image.Resampling.BILINEAR
