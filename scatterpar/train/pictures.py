"""Pictures in files: torchvision finds them, timm varies them, each with its own random numbers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from scatterpar.train.random_state import drawing_from, seed_of

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # of 0 to 255; that of models trained there
IMAGENET_STD = (58.395, 57.12, 57.375)
LARGEST_DEFAULT_SIZE = 224
_SMALL = 128  # pixels; below, images are usually made at that size, and have no edges to spare
_OPERATORS: list[torch.library.Library] = []


def torchvision(module: str) -> Any:
    """Import a module of torchvision, also beside a torch that it was not built for.

    Its compiled operators, which detect objects, are not there then, and its import fails on their
    names. Nothing here needs them: names alone let it go on.

    Raises:
        UsageError: it does not import.
    """
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError as error:
        raise UsageError(
            f"this needs torchvision: pip install scatterpar[images] ({error})"
        ) from error
    except RuntimeError as error:
        spec = importlib.util.find_spec("torchvision")
        if _OPERATORS or "torchvision::" not in str(error) or not (spec and spec.origin):
            raise
        _OPERATORS.append(torch.library.Library("torchvision", "DEF"))
        text = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
        for name in set(re.findall(r'(?:torchvision::|register_meta\(")(\w+)"', text)):
            _OPERATORS[0].define(f"{name}(Tensor x) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module(f"torchvision.{module}")


def import_timm(module: str) -> Any:
    """Import a module of timm.

    Raises:
        UsageError: it does not import.
    """
    torchvision("ops")
    try:
        return importlib.import_module(f"timm.{module}")
    except ImportError as error:
        raise UsageError(f"this needs timm: pip install scatterpar[images] ({error})") from error


@dataclass(frozen=True)
class Reading:
    """How pictures in files are read: what the command line says about it.

    Attributes:
        image_size: height and width that they are brought to; None: 224, or the shorter side
            of the first one where that is smaller.
        augment: how training pictures are varied. `none`: not; None or `crop`: random crop and
            flip; a policy of timm's, such as `rand-m9-mstd0.5` or `augmix-m5`: that after them.
        smallest_crop: smallest part of an image's area that a random crop shows.
        erase: how often a rectangle is erased (Zhong et al. 2017, arXiv:1708.04896).
        mixup: alpha of mixup (Zhang et al. 2017, arXiv:1710.09412); 0 for none.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv:1905.04899); 0 for none.
        seed: decides what is random about that.
        root: where data sets of libraries lie.
        download: whether these may be fetched.
    """

    image_size: int | None = None
    augment: str | None = None
    smallest_crop: float = 0.08
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    seed: int = 0
    root: Path = Path("data")
    download: bool = False

    @property
    def changes_pictures(self) -> bool:
        """Whether anything is asked for that pictures in memory do not have."""
        elsewhere = {"seed": 0, "root": Path("data"), "download": False}
        asked = None if self.augment == "none" else self.augment
        return replace(self, augment=asked, **elsewhere) != Reading()  # type: ignore[arg-type]


@functools.cache
def _transforms(size: int, how: Reading, classes: int) -> dict[str, tuple[Any, Any]]:
    """What is done to each picture of a part, and to a piece; each process makes its own.

    Test pictures are the middle, after the shorter side was brought to 8/7 of the size: 256 for
    224, the size itself below 128. All come out as uint8 (3, size, size).
    """
    v2, policy = torchvision("transforms.v2"), how.augment if how.augment != "crop" else None
    make = functools.partial(
        import_timm("data").create_transform, size, interpolation="bilinear", normalize=False
    )
    test = varied = make(crop_pct=1.0 if size < _SMALL else 7 / 8)
    if policy != "none":
        crop = (how.smallest_crop, 1.0)
        try:
            varied = make(is_training=True, scale=crop, color_jitter=None, auto_augment=policy)
        except (AssertionError, ValueError, KeyError) as error:
            raise UsageError(
                f"--augment {policy} is neither none, nor crop, nor a policy of timm's, such as "
                f"rand-m9-mstd0.5 ({words_of(error)})"
            ) from error
        for op in (op for step in varied.transforms for op in getattr(step, "ops", ())):
            if "Posterize" in op.name:  # down to no bits, which Pillow 13 refuses
                op.level_fn = functools.partial(_some_bits, op.level_fn)
    if how.erase:
        grey = [round(value) for value in IMAGENET_MEAN]  # zero once it is standardised
        varied = v2.Compose([varied, v2.RandomErasing(how.erase, value=grey)])
    mixing = [
        kind(alpha=alpha, num_classes=classes)
        for kind, alpha in ((v2.MixUp, how.mixup), (v2.CutMix, how.cutmix))
        if alpha
    ]
    return {TRAIN: (varied, v2.RandomChoice(mixing) if mixing else None), TEST: (test, None)}


def _some_bits(level: Callable[..., tuple[int]], *strength: Any) -> tuple[int]:
    return (max(1, level(*strength)[0]),)


class Files:
    """Picture files with labels.

    The names are kept as one tensor of bytes, which worker processes share: a list of a million
    strings would be copied into each of them (PyTorch issue 13246).
    """

    def __init__(self, found: Sequence[tuple[str, int]]) -> None:
        encoded = [os.fsencode(name) for name, _ in found]
        width = max(map(len, encoded))
        padded = bytearray(b"".join(name.ljust(width, b"\0") for name in encoded))
        self._names = torch.frombuffer(padded, dtype=torch.uint8).view(len(encoded), width)
        self.labels = torch.tensor([label for _, label in found], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, row: int) -> str:
        """Return the file's name, its folder included."""
        return os.fsdecode(bytes(self._names[row].tolist()).rstrip(b"\0"))

    def open(self, row: int) -> tuple[Any, int]:
        """Decode the file; return the picture in RGB with its label."""
        from PIL import Image

        with Image.open(self.name(row)) as image:
            return image.convert("RGB"), int(self.labels[row])


@dataclass
class LibrarySet:
    """A data set that timm opens: pairs of a picture, decoded or not, and a label."""

    pairs: Any
    title: str

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, row: int) -> str:
        """Return the set's name and the row."""
        return f"{self.title}, image {row}"

    def open(self, row: int) -> tuple[Any, int]:
        """Decode the picture; return it in RGB with its label."""
        from PIL import Image

        found, label = self.pairs[row]
        image = found if isinstance(found, Image.Image) else Image.open(found)
        return image.convert("RGB"), int(label)


Pictures = Files | LibrarySet
_Parts = tuple[Pictures, Pictures, tuple[str, ...]]


class PictureData(Source):
    """Pictures to train and to test on; each reading decodes them anew.

    What is random about an image is decided by the seed, the epoch and its row alone. So it is
    the same in every worker, and in a run that goes on in the middle of an epoch. (Mixing
    images with each other is decided by the first row of what is read together.)
    """

    train: Pictures
    test: Pictures

    def __init__(
        self, name: str, train: Pictures, test: Pictures, classes: tuple[str, ...], how: Reading
    ) -> None:
        size = how.image_size or min(LARGEST_DEFAULT_SIZE, _first_size(train))
        statistics = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        super().__init__(name, train, test, classes, (3, size, size), *statistics)
        self.seed = how.seed
        self._how = size, how, len(classes)
        _transforms(*self._how)  # to say at once what is missing

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Decode and transform rows of a part, as they are in an epoch."""
        pictures = self.train if part == TRAIN else self.test
        transform, mix = _transforms(*self._how)[part]
        found: list[tuple[Tensor, int, int]] = []
        broken: list[Broken] = []
        with drawing_from() as seed:
            for row in rows.tolist():
                try:
                    picture, label = pictures.open(row)
                except MemoryError:
                    raise
                except Exception as error:  # Pillow's decoders raise many kinds
                    broken.append(Broken(pictures.name(row), words_of(error)))
                    continue
                seed(seed_of(self.seed, epoch, row))
                found.append((transform(picture), label, row))
            if not found:
                empty = torch.empty(0)
                return Images(empty, empty, empty, broken)
            images, labels, numbers = zip(*found, strict=True)
            stacked, targets = torch.stack(images), torch.tensor(labels)
            if mix is not None:
                seed(seed_of(self.seed, epoch, -1 - int(rows[0])))
                mixed, targets = mix(stacked.float(), targets)
                stacked = mixed.round_().to(torch.uint8)
        return Images(stacked, targets, torch.tensor(numbers), broken)


def open_data(name: str, reading: Reading) -> Source:
    """Open what `--data` names.

    Raises:
        UsageError: there is no such data, it is not whole and consistent, or it stays in memory
            and so takes no such options.
    """
    path = Path(name).expanduser()
    try:
        if (path / "train").is_dir() and ((path / "test").is_dir() or (path / "val").is_dir()):
            parts = _open_folder(path)
        elif name.startswith(("torch/", "hfds/")):
            parts = _open_library(name, reading)
        elif name != EMBEDDED:
            raise UsageError(
                "there is no folder with train/ and test/ (or val/); known by name are "
                f"{EMBEDDED}, torch/NAME and hfds/NAME"
            )
        elif reading.changes_pictures:
            raise UsageError(
                "it is used as it is: --image-size, --augment, --erase, --mixup and --cutmix are "
                "for pictures in files"
            )
        else:
            return load()
        return PictureData(name, *parts, reading)
    except UsageError as error:
        raise UsageError(f"--data {name}: {error}") from error


def find_files(folder: Path, classes: Sequence[str], allow_empty: bool = False) -> Files:
    """Find the pictures in the folders of classes, as deep as they lie, in order.

    Hidden files are left alone: some systems put files like `._photo.jpg` beside pictures.

    Raises:
        UsageError: there are none, or none of a class.
    """
    found, start = torchvision("datasets.folder"), len(str(folder))
    numbers = {name: number for number, name in enumerate(classes)}

    def is_picture(path: str) -> bool:
        return f"{os.sep}." not in path[start:] and bool(found.is_image_file(path))

    try:
        samples = found.make_dataset(str(folder), numbers, None, is_picture, allow_empty)
    except FileNotFoundError as error:
        endings = ", ".join(found.IMG_EXTENSIONS)
        raise UsageError(f"{folder}: {words_of(error)} Pictures end in {endings}") from error
    if not samples:
        raise UsageError(f"{folder} holds no pictures")
    return Files(samples)


def _open_folder(path: Path) -> _Parts:
    held_out = path / "test" if (path / "test").is_dir() else path / "val"
    classes, others = (
        [entry.name for entry in sorted(part.iterdir()) if _is_class(entry)]
        for part in (path / "train", held_out)
    )
    if not classes:
        raise UsageError(f"{path / 'train'} has no folders in it: it needs one for each class")
    if odd := sorted({*classes} ^ {*others}):
        raise UsageError(f"train and {held_out.name} have different classes ({', '.join(odd)})")
    test = find_files(held_out, classes, allow_empty=True)
    return find_files(path / "train", classes), test, tuple(classes)


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _open_library(name: str, reading: Reading) -> _Parts:
    if not reading.download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
    create = import_timm("data").create_dataset

    def opened(*splits: str) -> Any:
        problem: Exception | None = None
        for split in splits:
            try:
                found = create(name, str(reading.root), split, download=reading.download)
                return getattr(found, "reader", found)
            except Exception as error:
                problem = error
        needs = "pip install scatterpar[datasets]"
        where = f"looked in --data-root {reading.root}; --download fetches it"
        hint = needs if isinstance(problem, ImportError) else where
        raise UsageError(f"{words_of(problem or ValueError()):.300} ({hint})") from problem

    train, test = opened("train"), opened("test", "validation", "val")
    classes = getattr(train, "classes", None) or getattr(train, "class_to_idx", None)
    if not classes:
        raise UsageError("it does not say what its classes are called")
    names = tuple(map(str, classes))
    return LibrarySet(train, f"{name} (train)"), LibrarySet(test, f"{name} (test)"), names


def _first_size(pictures: Pictures) -> int:
    """Return the shorter side of the first picture that can be read."""
    for row in range(len(pictures)):
        try:
            return int(min(pictures.open(row)[0].size))
        except Exception:  # it is named when its turn comes
            continue
    raise UsageError(f"no image can be read: {pictures.name(0)} and all others are broken")
