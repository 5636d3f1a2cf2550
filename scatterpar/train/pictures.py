"""Pictures in files: torchvision finds them, timm varies them, with random numbers per picture."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scatterpar.train.data import (
    EMBEDDED,
    TEST,
    TRAIN,
    Broken,
    Images,
    Source,
    UsageError,
    load,
    words_of,
)
from scatterpar.train.machines import random_states, seed_host, seed_of, set_random_states
from scatterpar.train.options import Options

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # for pixels from 0 to 255
IMAGENET_STD = (58.395, 57.12, 57.375)
LARGEST_DEFAULT_SIZE = 224
_SMALL = 128  # pixels; smaller images usually have no edges that can be cut off
_OPERATORS: list[torch.library.Library] = []
_INSTALL = "pip install -c constraints.txt -e"
OTHER_BUILD = (
    "this torchvision was built for another torch; the one for torch's CPU build: "
    "pip install torchvision --index-url https://download.pytorch.org/whl/cpu"
)


def library(module: str) -> Any:
    """Import a module of torchvision or timm, even if torchvision was built for another torch.

    Then its compiled operators, for object detection, cannot be loaded. The tool does not need
    them, and the import succeeds if their names are defined.
    """
    try:
        importlib.import_module("torchvision.ops")
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"this needs torchvision and timm: {_INSTALL} '.[images]' where you cloned scatterpar; "
            f"with torch's CPU build see docs/start.md, The smaller download ({error})"
        ) from error
    except RuntimeError as error:
        spec = importlib.util.find_spec("torchvision")
        if _OPERATORS or "torchvision::" not in str(error) or not (spec and spec.origin):
            raise UsageError(f"{OTHER_BUILD} ({words_of(error)})") from error
        _OPERATORS.append(torch.library.Library("torchvision", "DEF"))
        text = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
        for name in set(re.findall(r'(?:torchvision::|register_meta\(")(\w+)"', text)):
            _OPERATORS[0].define(f"{name}(Tensor x) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return library(module)


@functools.cache
def _transforms(size: int, options: Options, classes: int) -> dict[str, tuple[Any, Any]]:
    """For each part, the transforms of a picture and of a piece; made once per process.

    Test pictures are scaled so that the shorter side is 8/7 of the size (256 for 224; below 128 the
    size itself), and the middle is used. Pictures become uint8 (3, size, size).
    """
    v2 = library("torchvision.transforms.v2")
    policy = options.augment if options.augment != "crop" else None
    make = functools.partial(
        library("timm.data").create_transform, size, interpolation="bilinear", normalize=False
    )
    test = varied = make(crop_pct=1.0 if size < _SMALL else 7 / 8)
    if policy != "none":
        crop = (options.smallest_crop, 1.0)
        try:
            varied = make(is_training=True, scale=crop, color_jitter=None, auto_augment=policy)
        except (AssertionError, ValueError, KeyError) as error:
            raise UsageError(
                f"--augment {policy} is neither none, nor crop, nor a policy of timm's, such as "
                f"rand-m9-mstd0.5 ({words_of(error)})"
            ) from error
        for op in (op for step in varied.transforms for op in getattr(step, "ops", ())):
            if "Posterize" in op.name:  # Pillow 13 refuses zero bits
                op.level_fn = functools.partial(_some_bits, op.level_fn)
    if options.erase:
        grey = [round(value) for value in IMAGENET_MEAN]  # standardised, this is zero
        varied = v2.Compose([varied, v2.RandomErasing(options.erase, value=grey)])
    mixing = [
        kind(alpha=alpha, num_classes=classes)
        for kind, alpha in ((v2.MixUp, options.mixup), (v2.CutMix, options.cutmix))
        if alpha
    ]
    return {TRAIN: (varied, v2.RandomChoice(mixing) if mixing else None), TEST: (test, None)}


def _some_bits(level: Callable[..., tuple[int]], *strength: Any) -> tuple[int]:
    return (max(1, level(*strength)[0]),)


class Files:
    """Names of files, and their labels: two tensors, which worker processes share."""

    def __init__(self, found: Sequence[tuple[str, int]]) -> None:
        encoded = [os.fsencode(name) for name, _ in found]
        width = max(map(len, encoded))
        padded = bytearray(b"".join(name.ljust(width, b"\0") for name in encoded))
        self._names = torch.frombuffer(padded, dtype=torch.uint8).view(len(encoded), width)
        self.labels = torch.tensor([label for _, label in found], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[str, int]:
        return os.fsdecode(bytes(self._names[row].tolist()).rstrip(b"\0")), int(self.labels[row])


@dataclass
class Pictures:
    """Pairs of a picture, decoded or the name of a file, and a label. Data sets have a title."""

    pairs: Any
    title: str = ""

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, row: int) -> str:
        """Return the name of the file, or the title of the data set and the row."""
        return f"{self.title}, image {row}" if self.title else str(self.pairs[row][0])

    def open(self, row: int) -> tuple[Any, int]:
        """Decode a picture. Returns it in RGB, and its label."""
        from PIL import Image

        picture, label = self.pairs[row]
        image = picture if isinstance(picture, Image.Image) else Image.open(picture)
        return image.convert("RGB"), int(label)


class PictureData(Source):
    """Pictures to train and to test on, which are decoded each time they are read.

    The random variation of an image depends only on the seed, the epoch and its row, so it is the
    same in every worker and after a resume within an epoch. How images of a piece are mixed depends
    on the first row of the piece.
    """

    train: Pictures
    test: Pictures

    def __init__(
        self, options: Options, train: Pictures, test: Pictures, classes: tuple[str, ...]
    ) -> None:
        size = options.image_size or min(LARGEST_DEFAULT_SIZE, _first_size(train))
        statistics = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        super().__init__(options.data, train, test, classes, (3, size, size), *statistics)
        self._transform_args = size, options, len(classes)
        _transforms(*self._transform_args)  # raises now if a library is missing

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Decode and transform rows of a part, as they are in an epoch."""
        pictures = self.train if part == TRAIN else self.test
        transform, mix = _transforms(*self._transform_args)[part]
        rows_read: list[tuple[Tensor, int, int]] = []
        broken: list[Broken] = []
        seed, before = self._transform_args[1].seed, random_states()
        try:
            for row in rows.tolist():
                try:
                    picture, label = pictures.open(row)
                except MemoryError:
                    raise
                except Exception as error:  # Pillow's decoders raise many kinds
                    broken.append(Broken(pictures.name(row), words_of(error)))
                    continue
                seed_host(seed_of(seed, epoch, row))
                rows_read.append((transform(picture), label, row))
            if not rows_read:
                empty = torch.empty(0)
                return Images(empty, empty, empty, broken)
            images, labels, numbers = zip(*rows_read, strict=True)
            stacked, targets = torch.stack(images), torch.tensor(labels)
            if mix is not None:
                seed_host(seed_of(seed, epoch, -1 - int(rows[0])))
                mixed, targets = mix(stacked.float(), targets)
                stacked = mixed.round_().to(torch.uint8)
        finally:
            set_random_states(before)
        return Images(stacked, targets, torch.tensor(numbers), broken)


def open_data(options: Options) -> Source:
    """Open the data that `--data` names."""
    try:
        return _open(options, Path(options.data).expanduser())
    except UsageError as error:
        raise UsageError(f"--data {options.data}: {error}") from error


def _open(options: Options, path: Path) -> Source:
    train = path / "train" if (path / "train").is_dir() else path
    tests = [path / part for part in ("test", "val") if train != path and (path / part).is_dir()]
    named = options.data == EMBEDDED or options.data.startswith(("torch/", "hfds/"))
    if not path.is_dir() and not named:
        raise UsageError(
            "there is no folder with train/ and test/ (or val/), nor one of classes for --val; "
            f"known by name are {EMBEDDED}, torch/NAME and hfds/NAME"
        )
    by_name = options.data == EMBEDDED or not path.is_dir()
    if options.val is not None and (by_name or tests):
        raise UsageError("it has images to test on; leave out --val")
    if by_name:
        return _open_by_name(options)
    names = _folders_in(train)
    if not names:
        raise UsageError(f"{train} has no folders in it: it needs one for each class")
    if not tests and options.val is None:
        raise UsageError(
            "class folders, no split: --val 0.1 tests on a tenth of each class; or make train/ and "
            "test/ (or val/) with the classes in each"
        )
    if tests and (odd := sorted({*names} ^ {*_folders_in(tests[0])})):
        raise UsageError(f"train and {tests[0].name} have different classes ({', '.join(odd)})")
    pictures = find_files(train, names)
    if not tests:
        return PictureData(options, *_split(pictures, options.val or 0.0), tuple(names))
    test = find_files(tests[0], names, allow_empty=True)
    return PictureData(options, pictures, test, tuple(names))


def _folders_in(folder: Path) -> list[str]:
    return [e.name for e in sorted(folder.iterdir()) if e.is_dir() and not e.name.startswith(".")]


def _split(pictures: Pictures, part: float) -> tuple[Pictures, Pictures]:
    """Split each class into pictures to train on and to test on, in the same way in every run."""
    labels, train, test = pictures.pairs.labels, list[int](), list[int]()
    generator = torch.Generator().manual_seed(0)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        number = max(1, round(len(rows) * part))
        if number == len(rows):
            name = Path(pictures.name(int(rows[0]))).parent
            raise UsageError(f"{name} has too few pictures ({len(rows)}) for --val {part}")
        order = rows[torch.randperm(len(rows), generator=generator)].tolist()
        test += order[:number]
        train += order[number:]
    chosen = (Files([pictures.pairs[row] for row in sorted(rows)]) for rows in (train, test))
    return Pictures(next(chosen)), Pictures(next(chosen))


def find_files(folder: Path, classes: Sequence[str], allow_empty: bool = False) -> Pictures:
    """Find the pictures in the folders of classes, at any depth, except hidden ones."""
    finder, start = library("torchvision.datasets.folder"), len(str(folder))
    numbers = {name: number for number, name in enumerate(classes)}

    def is_picture(path: str) -> bool:
        return f"{os.sep}." not in path[start:] and bool(finder.is_image_file(path))

    try:
        samples = finder.make_dataset(str(folder), numbers, None, is_picture, allow_empty)
    except FileNotFoundError as error:
        endings = ", ".join(finder.IMG_EXTENSIONS)
        raise UsageError(f"{folder}: {words_of(error)} Pictures end in {endings}") from error
    if not samples:
        raise UsageError(f"{folder} holds no pictures")
    return Pictures(Files(samples))


def _open_by_name(options: Options) -> Source:
    if options.data == EMBEDDED:
        varied = options.augment not in (None, "none")
        if options.image_size or varied or options.erase or options.mixup or options.cutmix:
            raise UsageError(
                "it is used as it is: --image-size, --augment, --erase, --mixup and --cutmix are "
                "for pictures in files"
            )
        return load()
    if not options.download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
    create, name, root = library("timm.data").create_dataset, options.data, options.data_root

    def opened(split: str, *others: str) -> Any:
        try:
            found = create(name, str(root), split, download=options.download)
            return getattr(found, "reader", found)
        except Exception as error:
            if others:
                return opened(*others)
            hint = f"looked in --data-root {root}; --download fetches it"
            if isinstance(error, ImportError):
                hint = f"{_INSTALL} '.[datasets]' where you cloned scatterpar"
            raise UsageError(f"{words_of(error):.300} ({hint})") from error

    train, test = opened("train"), opened("test", "validation", "val")
    names = getattr(train, "classes", None) or getattr(train, "class_to_idx", None)
    if not names:
        raise UsageError("it does not say what its classes are called")
    sets = Pictures(train, f"{name} (train)"), Pictures(test, f"{name} (test)")
    return PictureData(options, *sets, tuple(map(str, names)))


def _first_size(pictures: Pictures) -> int:
    """Return the shorter side of the first readable picture."""
    for row in range(len(pictures)):
        try:
            return int(min(pictures.open(row)[0].size))
        except Exception:  # the feed reports it later
            continue
    raise UsageError(f"no image can be read: {pictures.name(0)} and all others are broken")
