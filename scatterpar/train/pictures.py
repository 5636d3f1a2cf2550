"""Pictures in files: torchvision finds, opens and varies them, each with random numbers of its own.

The settings are those of torchvision's reference scripts; timm's policies can be named too.
"""

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
from typing import Any, Protocol

import torch
from torch import Tensor

from scatterpar.train.data import TEST, TRAIN, Broken, Images, Source, load
from scatterpar.train.errors import UsageError, words_of
from scatterpar.train.random_state import drawing_from, seed_of

Transform = Callable[[Any], Tensor]
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


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied.

    Attributes:
        kind: `none`; `crop`: random crop and flip; `trivial` (Müller and Hutter 2021,
            arXiv:2103.10158), `rand` (Cubuk et al. 2019, arXiv:1909.13719) or a policy of timm's,
            such as `rand-m9-mstd0.5` or `augmix-m5`: those after it.
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


@dataclass(frozen=True)
class Reading:
    """How pictures in files are read: what the command line says about it.

    Attributes:
        image_size: height and width that they are brought to; None: 224, or the shorter side
            of the first one where that is smaller.
        augmentation: how training images are varied; None: the default for pictures in files.
        seed: decides what is random about that.
        root: where data sets of libraries lie.
        download: whether these may be fetched.
    """

    image_size: int | None = None
    augmentation: Augmentation | None = None
    seed: int = 0
    root: Path = Path("data")
    download: bool = False


def for_training(size: int, augmentation: Augmentation) -> Transform:
    """Make the transform of training pictures to uint8 (3, size, size).

    Raises:
        UsageError: timm is needed and not there, or has no such policy.
    """
    v2, kind = torchvision("transforms.v2"), augmentation.kind
    crop = [
        v2.RandomResizedCrop(size, (augmentation.smallest_crop, 1.0)),
        v2.RandomHorizontalFlip(),
    ]
    own = {"crop": [], "trivial": [v2.TrivialAugmentWide()], "rand": [v2.RandAugment()]}
    if kind == "none":
        steps = [for_testing(size)]
    else:
        steps = [*crop, *(own[kind] if kind in own else _policy(kind, size)), v2.PILToTensor()]
    if augmentation.erase:
        grey = [round(value) for value in IMAGENET_MEAN]  # zero once it is standardised
        steps.append(v2.RandomErasing(augmentation.erase, value=grey))
    transform: Transform = v2.Compose(steps)
    return transform


def _policy(name: str, size: int) -> list[Any]:
    try:
        made = import_timm("data").create_transform(
            size, is_training=True, auto_augment=name, separate=True, interpolation="bilinear"
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise UsageError(
            f"--augment {name} is none of none, crop, trivial and rand, nor a policy of timm's, "
            f"such as rand-m9-mstd0.5 ({words_of(error)})"
        ) from error
    for step in made[1].transforms:
        for op in getattr(step, "ops", ()):
            if "Posterize" in op.name:  # down to no bits, which Pillow 13 refuses
                op.level_fn = functools.partial(_some_bits, op.level_fn)
    return list(made[1].transforms)


def _some_bits(level: Callable[..., tuple[int]], *strength: Any) -> tuple[int]:
    return (max(1, level(*strength)[0]),)


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


def for_testing(size: int) -> Transform:
    """Make the transform of test pictures: the middle, as uint8 (3, size, size).

    The shorter side is brought to 8/7 of the size before: 256 for 224, the size itself below 128.
    """
    v2 = torchvision("transforms.v2")
    resize = v2.Resize(size if size < _SMALL else round(size * 8 / 7))
    transform: Transform = v2.Compose([resize, v2.CenterCrop(size), v2.PILToTensor()])
    return transform


def for_batches(augmentation: Augmentation, classes: int) -> Any:
    """Return what mixes images and labels of a piece with each other, or None."""
    v2, choices = torchvision("transforms.v2"), []
    if augmentation.mixup:
        choices.append(v2.MixUp(alpha=augmentation.mixup, num_classes=classes))
    if augmentation.cutmix:
        choices.append(v2.CutMix(alpha=augmentation.cutmix, num_classes=classes))
    return v2.RandomChoice(choices) if choices else None


@functools.cache
def _transforms(
    size: int, augmentation: Augmentation, classes: int
) -> dict[str, tuple[Transform, Any]]:
    """What is done to each picture of a part, and to a piece; each process makes its own."""
    varied = for_training(size, augmentation), for_batches(augmentation, classes)
    return {TRAIN: varied, TEST: (for_testing(size), None)}


class Pictures(Protocol):
    """Pictures with labels, each opened on its own."""

    def __len__(self) -> int:
        """How many there are."""

    def name(self, row: int) -> str:
        """Where a picture is, in words."""

    def open(self, row: int) -> tuple[Any, int]:
        """Decode a picture; return a `PIL.Image.Image` in RGB and its label."""


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
        """Decode the file; return it with its label."""
        from PIL import Image

        with Image.open(self.name(row)) as image:
            return image.convert("RGB"), int(self.labels[row])


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
        found = self._pairs[row]
        image, label = found.values() if isinstance(found, dict) else found
        return image.convert("RGB"), int(label)


_Parts = tuple[Pictures, Pictures, tuple[str, ...]]


class PictureData:
    """Pictures to train and to test on; each reading decodes them anew.

    What is random about an image is decided by the seed, the epoch and its row alone. So it is
    the same in every worker, and in a run that goes on in the middle of an epoch. (Mixing
    images with each other is decided by the first row of what is read together.)

    Args:
        name: what the data are called.
        train: pictures to train on.
        test: pictures to test on.
        class_names: a name for each label.
        size: height and width that they are brought to.
        augmentation: how training images are varied.
        seed: decides what is random.
    """

    def __init__(
        self,
        name: str,
        train: Pictures,
        test: Pictures,
        class_names: tuple[str, ...],
        size: int,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        self.name = name
        self.train = train
        self.test = test
        self.class_names = class_names
        self.image_shape = (3, size, size)
        self.mean = torch.tensor(IMAGENET_MEAN)
        self.std = torch.tensor(IMAGENET_STD)
        self.in_memory = False
        self.seed = seed
        self._how = size, augmentation, len(class_names)
        _transforms(*self._how)  # to say at once what is missing

    def read(self, part: str, rows: Tensor, epoch: int) -> Images:
        """Decode and transform rows of a part, as they are in an epoch."""
        pictures = self.train if part == TRAIN else self.test
        transform, mix = _transforms(*self._how)[part]
        images: list[Tensor] = []
        labels: list[int] = []
        numbers: list[int] = []
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
                images.append(transform(picture))
                labels.append(label)
                numbers.append(row)
            stacked = torch.stack(images) if images else torch.empty(0, dtype=torch.uint8)
            targets = torch.tensor(labels, dtype=torch.int64)
            if mix is not None and labels:
                seed(seed_of(self.seed, epoch, -1 - int(rows[0])))
                mixed, targets = mix(stacked.float(), targets)
                stacked = mixed.round_().to(torch.uint8)
        return Images(stacked, targets, torch.tensor(numbers), broken)

    def __str__(self) -> str:
        size = self.image_shape[1]
        return (
            f"{self.name}: {len(self.train):,} images to train on, {len(self.test):,} to test, "
            f"{len(self.class_names)} classes, brought to 3 x {size} x {size}"
        )


def open_data(name: str, reading: Reading) -> Source:
    """Open what `--data` names.

    Args:
        name: a folder of images in train/CLASS/ and test/CLASS/ (or val), what `data.load`
            takes, or `torchvision:` and the name of a set in `torchvision.datasets`, or `datasets:`
            and the name or folder of one of Hugging Face's `datasets`.
        reading: how pictures in files are read.

    Raises:
        UsageError: there is no such data, it is not whole and consistent, or it stays in memory
            and so takes no such options.
    """
    path = Path(name).expanduser()
    library, colon, wanted = name.partition(":")
    try:
        if (path / "train").is_dir() and ((path / "test").is_dir() or (path / "val").is_dir()):
            train, test, classes = _open_folder(path)
        elif colon and library == "torchvision":
            train, test, classes = _open_torchvision(wanted, reading)
        elif colon and library == "datasets":
            train, test, classes = _open_datasets(wanted, reading)
        elif reading.augmentation not in (None, Augmentation("none")) or reading.image_size:
            raise UsageError(
                "it is used as it is: --image-size, --augment, --erase, --mixup and --cutmix are "
                "for pictures in files"
            )
        else:
            return load(name)
    except UsageError as error:
        raise UsageError(f"--data {name}: {str(error).removeprefix(f'--data {name}: ')}") from error
    size = reading.image_size or min(LARGEST_DEFAULT_SIZE, _first_size(train))
    augmentation = reading.augmentation or Augmentation()
    return PictureData(name, train, test, classes, size, augmentation, reading.seed)


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
    classes = _classes(path / "train")
    if odd := sorted(set(classes) ^ set(_classes(held_out))):
        raise UsageError(f"train and {held_out.name} have different classes ({', '.join(odd)})")
    return find_files(path / "train", classes), find_files(held_out, classes, True), classes


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
    classes = tuple(name for name in names if not name.startswith("."))
    if not classes:
        raise UsageError(f"{folder} has no folders in it: it needs one for each class")
    return classes


def _open_torchvision(name: str, reading: Reading) -> _Parts:
    """Open a set whose constructor takes `train=` or `split=`, such as `CIFAR10`."""
    factory = getattr(torchvision("datasets"), name, None)
    if not isinstance(factory, type):
        raise UsageError(f"torchvision.datasets has no {name}")
    keywords = {"download": True} if reading.download else {}
    problem: object = "its constructor takes neither train= nor split="

    def opened(*choices: dict[str, Any]) -> Any:
        nonlocal problem
        for choice in choices:
            try:
                return factory(str(reading.root), **choice, **keywords)
            except TypeError:
                continue  # its constructor has no such parameter
            except Exception as error:
                problem = error
        raise UsageError(_not_there(problem, reading))

    train = opened({"train": True}, {"split": "train"})
    test = opened({"train": False}, {"split": "test"}, {"split": "val"})
    labels = getattr(train, "classes", None)
    count = len(labels) if labels else 1 + max(int(train[row][1]) for row in range(len(train)))
    names = tuple(str(label) for label in labels or range(count))
    return LibrarySet(train, f"{name} (train)"), LibrarySet(test, f"{name} (test)"), names


def _open_datasets(name: str, reading: Reading) -> _Parts:
    """Open a hub's name or a `save_to_disk` folder, with an image and a class in each row."""
    if not reading.download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            "this needs Hugging Face's datasets: pip install scatterpar[datasets]"
        ) from error
    try:
        if (Path(name) / "dataset_dict.json").exists():
            parts = library.load_from_disk(name)
        else:
            parts = library.load_dataset(name, cache_dir=str(reading.root))
    except Exception as error:
        raise UsageError(_not_there(error, reading)) from error
    held_out = next((part for part in ("test", "validation", "val") if part in parts), None)
    if "train" not in parts or held_out is None:
        raise UsageError(f"it has {', '.join(parts)}, not train and test")
    features = parts["train"].features
    columns = []
    for kind in (library.Image, library.ClassLabel):
        found = [column for column, feature in features.items() if isinstance(feature, kind)]
        if len(found) != 1:
            raise UsageError(
                f"it needs one column of kind {kind.__name__}, and has "
                f"{', '.join(found) or 'none'} among {', '.join(features)}"
            )
        columns += found
    train, test = (
        LibrarySet(parts[part].select_columns(columns), f"{name} ({part})")
        for part in ("train", held_out)
    )
    return train, test, tuple(features[columns[1]].names)


def _not_there(problem: object, reading: Reading) -> str:
    words = " ".join(str(problem).split())
    return f"{words:.300} (looked in --data-root {reading.root}; --download fetches it)"


def _first_size(pictures: Pictures) -> int:
    """Return the shorter side of the first picture that can be read."""
    for row in range(len(pictures)):
        try:
            return int(min(pictures.open(row)[0].size))
        except Exception:  # it is named when its turn comes
            continue
    raise UsageError(f"no image can be read: {pictures.name(0)} and all others are broken")
