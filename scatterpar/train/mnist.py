"""Find the four files of an MNIST-family data set in a folder, and load them as two splits."""

from __future__ import annotations

import re
from pathlib import Path

from scatterpar.train.errors import UsageError
from scatterpar.train.idx import read_images, read_labels
from scatterpar.train.split import Split

_NAME = re.compile(
    r"(?P<prefix>.*?)-?(?P<part>train|t10k|test)-(?P<kind>images|labels)[-.]idx[13]-ubyte(\.gz)?"
)
_WANTED = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_SET = dict[str, Path]


def load_sets(path: Path) -> tuple[Split, Split]:
    """Load the training and the test split of a folder, or of a folder/prefix.

    Files are named as MNIST, Fashion-MNIST, KMNIST and EMNIST name theirs, with or without .gz;
    where both are there, the one without is read. EMNIST's images, which are stored transposed,
    are turned upright.

    Raises:
        UsageError: there is no set, or more than one; a file is missing, or is not what it
            should be.
    """
    folder, prefix = (path, None) if path.is_dir() else (path.parent, path.name)
    prefix, files = _choose(folder, prefix, _find(folder))
    missing = [name for name in _WANTED if name not in files]
    if missing:
        names = ", ".join(
            f"{prefix}-{name}-ubyte" if prefix else f"{name}-ubyte" for name in missing
        )
        raise UsageError(f"{folder} lacks {names} (gzip or not)")
    transposed = prefix.startswith("emnist")
    train = load_pair(files["train-images-idx3"], files["train-labels-idx1"], transposed)
    test = load_pair(files["t10k-images-idx3"], files["t10k-labels-idx1"], transposed)
    return train, test


def load_pair(images_path: Path, labels_path: Path, transposed: bool = False) -> Split:
    """Load one file of images and its file of labels.

    Raises:
        UsageError: a file is not what it should be, or the two differ in their number of rows.
    """
    images, labels = read_images(images_path), read_labels(labels_path)
    if len(images) != len(labels):
        raise UsageError(
            f"{labels_path} has {len(labels)} labels, but {images_path} has {len(images)} images"
        )
    if transposed:
        images = images.transpose(1, 2).contiguous()
    return Split(images.unsqueeze(1), labels.long())


def is_prefix(path: Path) -> bool:
    """Tell whether a path is folder/prefix of at least one file of the family."""
    return path.parent.is_dir() and path.name in _find(path.parent)


def _find(folder: Path) -> dict[str, _SET]:
    """Map each prefix to its files, under the names of `_WANTED`."""
    sets: dict[str, _SET] = {}
    for file in sorted(folder.iterdir(), reverse=True):  # plain files after their .gz twins
        match = _NAME.fullmatch(file.name)
        if match:
            part = "train" if match["part"] == "train" else "t10k"
            dimensions = "idx3" if match["kind"] == "images" else "idx1"
            files = sets.setdefault(match["prefix"], {})
            files[f"{part}-{match['kind']}-{dimensions}"] = file
    return sets


def _choose(folder: Path, prefix: str | None, sets: dict[str, _SET]) -> tuple[str, _SET]:
    if prefix is not None:
        return prefix, sets[prefix]
    if not sets:
        raise UsageError(
            f"{folder} holds neither MNIST-family files (train-images-idx3-ubyte and so on, "
            "gzip or not) nor image folders train/ and test/ with a folder for each class"
        )
    if len(sets) > 1:
        choices = ", ".join(str(folder / name) for name in sorted(sets))
        raise UsageError(f"{folder} holds {len(sets)} data sets; choose one: --data {choices}")
    return next(iter(sets.items()))
