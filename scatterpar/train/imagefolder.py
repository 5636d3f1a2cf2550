"""Folders of images, one folder for each class, through torchvision where it is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from scatterpar.train.errors import UsageError
from scatterpar.train.split import Split


def load_image_folder(path: Path, image_size: int) -> tuple[Split, Split]:
    """Decode path/train/CLASS/* and path/test/CLASS/* (or val) into memory, as RGB.

    Args:
        path: the folder that holds the two.
        image_size: the images' shorter side is brought to this many pixels, and the middle is
            cut out as a square.

    Raises:
        UsageError: torchvision is missing, a class is missing on one side, or a file is no image.
    """
    try:
        datasets = importlib.import_module("torchvision.datasets")
        transforms = importlib.import_module("torchvision.transforms")
    except ImportError as error:
        raise UsageError(
            f"{path} is a folder of images, which needs torchvision: pip install torchvision"
        ) from error
    to_square = transforms.Compose(
        [
            transforms.Resize(image_size),
            transforms.CenterCrop(image_size),
            transforms.PILToTensor(),
        ]
    )
    held_out = "test" if (path / "test").is_dir() else "val"
    sides = {part: _open(datasets, path / part, to_square) for part in ("train", held_out)}
    train, test = sides["train"].classes, sides[held_out].classes
    if train != test:
        odd = ", ".join(sorted(set(train) ^ set(test)))
        raise UsageError(f"{path}: train and {held_out} have different classes ({odd})")
    return _decode(sides["train"]), _decode(sides[held_out])


def _open(datasets: Any, path: Path, to_square: Any) -> Any:
    try:
        return datasets.ImageFolder(str(path), to_square)
    except OSError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error


def _decode(folder: Any) -> Split:
    images, labels = [], []
    for row, (file, label) in enumerate(folder.samples):
        try:
            images.append(folder[row][0])
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read as an image: {error}") from error
        labels.append(label)
    return Split(torch.stack(images), torch.tensor(labels))
