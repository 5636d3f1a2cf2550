"""Data sets of libraries, by name: torchvision's, and those of Hugging Face `datasets`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from scatterpar.train.errors import UsageError


class LibrarySet:
    """A data set of a library's, of pairs of a PIL image and a label."""

    def __init__(self, pairs: Any, name: str) -> None:
        self._pairs = pairs
        self._name = name

    def __len__(self) -> int:
        return len(self._pairs)

    def name(self, row: int) -> str:
        """Return the set's name and the row."""
        return f"{self._name}, image {row}"

    def open(self, row: int) -> tuple[Any, int]:
        """Decode the picture; return it with its label."""
        image, label = self._pairs[row]
        return image.convert("RGB"), int(label)


def open_torchvision(
    name: str, root: Path, download: bool
) -> tuple[LibrarySet, LibrarySet, tuple[str, ...]]:
    """Open both parts of a data set of `torchvision.datasets`, and name its classes.

    Args:
        name: of a class there whose constructor takes `train=` or `split=`, such as `CIFAR10`.
        root: the folder that holds its files.
        download: fetch them where they are missing.

    Raises:
        UsageError: torchvision does not import, has no such set, or its files are not there.
    """
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except Exception as error:  # beside a torch that it was not built for: a RuntimeError
        words = " ".join(str(error).split())
        raise UsageError(
            f"--data torchvision:{name} needs torchvision: pip install scatterpar[images] ({words})"
        ) from error
    factory = getattr(datasets, name, None)
    if not isinstance(factory, type):
        raise UsageError(f"--data torchvision:{name}: torchvision.datasets has no {name}")
    train, test = (_open_part(factory, name, root, download, part) for part in (0, 1))
    labels = getattr(train, "classes", None)
    count = len(labels) if labels else 1 + max(int(train[row][1]) for row in range(len(train)))
    names = tuple(str(label) for label in labels or range(count))
    return LibrarySet(train, f"{name} (train)"), LibrarySet(test, f"{name} (test)"), names


def _open_part(factory: Any, name: str, root: Path, download: bool, part: int) -> Any:
    keywords = {"download": True} if download else {}
    tries: list[dict[str, Any]] = (
        [{"train": True}, {"split": "train"}]
        if part == 0
        else [{"train": False}, {"split": "test"}, {"split": "val"}]
    )
    problem: Exception | None = None
    for choice in tries:
        try:
            return factory(str(root), **choice, **keywords)
        except TypeError:
            continue  # its constructor has no such parameter
        except Exception as error:
            problem = error
    words = " ".join(str(problem or "its constructor takes neither train= nor split=").split())
    raise UsageError(
        f"--data torchvision:{name}: {words} (looked in --data-root {root}; --download fetches it)"
    )


def open_datasets(
    name: str, root: Path, download: bool
) -> tuple[LibrarySet, LibrarySet, tuple[str, ...]]:
    """Open a data set of Hugging Face's `datasets` with an image and a class in each row.

    Args:
        name: a folder that `save_to_disk` wrote, or a name that `load_dataset` takes.
        root: the folder for what is fetched.
        download: fetch it where it is missing.

    Raises:
        UsageError: `datasets` is not installed, the set is not there, or has no such rows.
    """
    if not download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"--data datasets:{name} needs Hugging Face's datasets: "
            "pip install scatterpar[datasets]"
        ) from error
    try:
        if Path(name).is_dir() and (Path(name) / "dataset_dict.json").exists():
            parts = library.load_from_disk(name)
        else:
            parts = library.load_dataset(name, cache_dir=str(root))
    except Exception as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"--data datasets:{name}: {words:.300} (looked in --data-root {root}; --download "
            "fetches it)"
        ) from error
    held_out = next((part for part in ("test", "validation", "val") if part in parts), None)
    if "train" not in parts or held_out is None:
        raise UsageError(f"--data datasets:{name} has {', '.join(parts)}, not train and test")
    features = parts["train"].features
    image = _column(name, features, library.Image)
    label = _column(name, features, library.ClassLabel)
    train, test = (
        LibrarySet(_Rows(parts[part], image, label), f"{name} ({part})")
        for part in ("train", held_out)
    )
    return train, test, tuple(features[label].names)


class _Rows:
    """The rows of a table as pairs of an image and a label."""

    def __init__(self, table: Any, image: str, label: str) -> None:
        self._table = table
        self._columns = image, label

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        found = self._table[row]
        image, label = self._columns
        return found[image], found[label]


def _column(name: str, features: Any, kind: type) -> str:
    found = [column for column, feature in features.items() if isinstance(feature, kind)]
    if len(found) != 1:
        raise UsageError(
            f"--data datasets:{name} needs one column of kind {kind.__name__}, and has "
            f"{', '.join(found) or 'none'} among {', '.join(features)}"
        )
    return str(found[0])
