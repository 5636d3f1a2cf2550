"""Images: the included ones, and pictures in files, which torchvision finds and timm varies.

The random variation of a picture depends only on the seed, the epoch and its row. So any worker
reads the same picture, also after a resume within an epoch.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.train.options import EMBEDDED, Options, UsageError, words_of

TRAIN, TEST = "train", "test"
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_MEAN = (123.675, 116.28, 103.53)  # ImageNet's, for pixels from 0 to 255
_STD = (58.395, 57.12, 57.375)
_HAS_TESTS = "it has images to test on; leave out --val"
_NO_SPLIT = "class folders, no split: --val 0.1 tests on a tenth of each class; or make train/ and "
_NO_SPLIT += "test/ (or val/) with the classes in each"
_INSTALL, _WHEELS = "pip install -c constraints.txt", "https://download.pytorch.org/whl/cpu"
OTHER_BUILD = (
    "this torchvision was built for another torch; the one for torch's CPU build: "
    f"pip install torchvision --index-url {_WHEELS}"
)


class Request(NamedTuple):
    """Rows of a part, `TRAIN` or `TEST`, to be read as one batch, varied as in that epoch."""

    part: str
    rows: Any  # a tensor; a list of a piece that is sent to a worker
    epoch: int = 0


class Images(NamedTuple):
    """Images that were read, and the names of unreadable ones, each with the reason.

    Images are uint8 (rows, channels, height, width). Labels are int64 (rows,), or float32
    (rows, classes) if images were mixed with each other. Row numbers are int64 (rows,).
    """

    images: Tensor
    labels: Tensor
    rows: Tensor
    broken: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Split:
    """Images and labels in memory, of the dtypes and shapes of `Images`."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


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
class Source:
    """Images to train and to test on, with the mean and deviation of their pixels per channel.

    Each part is a `Split`, or pictures: `Files`, or a library's pairs of a picture and a label.
    """

    name: str
    train: Any
    test: Any
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor
    options: Options = field(default_factory=Options)

    @property
    def in_memory(self) -> bool:
        """Whether images are tensors, which need neither workers nor transforms."""
        return isinstance(self.train, Split)

    def __getitem__(self, request: Request) -> Images:
        """Read the images of a request, or of a piece of one."""
        part, epoch, rows = request.part, request.epoch, torch.as_tensor(request.rows)
        pairs = self.train if part == TRAIN else self.test
        if self.in_memory:
            return Images(pairs.images[rows], pairs.labels[rows], rows)
        seed, size, classes = self.options.seed, self.image_shape[1], len(self.class_names)
        transform, mix = _transforms(size, self.options, classes)[part]
        images = torch.empty(len(rows), *self.image_shape, dtype=torch.uint8)
        found, broken = list[tuple[int, int]](), list[tuple[str, str]]()
        for row in rows.tolist():
            try:
                picture, label = _opened(pairs, row)
            except MemoryError:
                raise
            except Exception as error:  # Pillow's decoders raise many kinds
                of_files = isinstance(pairs, Files)
                name = pairs[row][0] if of_files else f"{self.name} ({part}), image {row}"
                broken.append((name, words_of(error)))
            else:
                seed_host("image", seed, epoch, row)
                images[len(found)] = transform(picture)
                found.append((label, row))
        images = images[: len(found)]
        labels, numbers = torch.tensor(found, dtype=torch.int64).view(-1, 2).unbind(1)
        if mix is not None and found:
            seed_host("piece", seed, epoch, int(rows[0]))
            mixed, labels = mix(images.float(), labels)
            images = mixed.round_().to(torch.uint8)
        return Images(images, labels, numbers, broken)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.image_shape))
        return (
            f"{self.name}: {len(self.train):,} images to train on, {len(self.test):,} to test, "
            f"{len(self.class_names)} classes, {'' if self.in_memory else 'brought to '}{shape}"
        )


def _opened(pairs: Any, row: int) -> tuple[Any, int]:
    """Decode a picture. Returns it in RGB, and its label."""
    from PIL import Image

    picture, label = pairs[row]
    image = picture if isinstance(picture, Image.Image) else Image.open(picture)
    return image.convert("RGB"), int(label)


def seed_of(*parts: object) -> int:
    """Return a seed that is a function of the parts. It has 32 bits: torch ignores others."""
    return random.Random(" ".join(map(str, parts))).getrandbits(32)


def seed_host(*parts: object) -> int:
    """Seed Python, NumPy, and torch on the CPU with a function of the parts, and return it."""
    seed = seed_of(*parts)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return seed


def load() -> Source:
    """Load the images that are included; a part of them is for testing."""
    whole = read_split(Path(__file__).parent / "embedded", "t10k")
    train, test = (
        Split(whole.images[rows], whole.labels[rows]) for rows in (slice(8192), slice(8192, None))
    )
    return make_dataset("embedded Fashion-MNIST", train, test, tuple(_FASHION.split(",")))


def make_dataset(name: str, train: Split, test: Split, class_names: tuple[str, ...]) -> Source:
    """Make a data set of two splits, with the statistics of the training pixels."""
    _, channels, height, width = train.images.shape
    std, mean = torch.std_mean(train.images.double(), (0, 2, 3), correction=0)
    shape = (channels, height, width)
    return Source(name, train, test, class_names, shape, mean.float(), std.float())


def read_split(folder: Path, part: str) -> Split:
    """Read 28 x 28 images and labels from MNIST's IDX files: a header, then single bytes."""

    def content(name: str, header: int) -> Tensor:
        file = gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(file[header:]), dtype=torch.uint8)

    return Split(content("images-idx3", 16).view(-1, 1, 28, 28), content("labels-idx1", 8).long())


def library(module: str) -> Any:
    """Import a module of torchvision or timm, even if torchvision was built for another torch.

    Then its operators for object detection are missing; the import succeeds if their names exist.
    """
    try:
        importlib.import_module("torchvision.ops")
        return importlib.import_module(module)
    except ImportError as error:
        wheels = f"--extra-index-url {_WHEELS} " if torch.version.cuda is None else ""
        line = f"where you cloned scatterpar run: {_INSTALL} {wheels}-e '.[images]'"
        raise UsageError(f"this needs torchvision and timm; {line} ({error})") from error
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise UsageError(f"{OTHER_BUILD} ({words_of(error)})") from error
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return library(module)


@functools.cache
def _transforms(size: int, options: Options, classes: int) -> dict[str, tuple[Any, Any]]:
    """Return the transforms of a picture and of a piece, by part. Pictures become uint8."""
    create, v2 = library("timm.data").create_transform, library("torchvision.transforms.v2")
    make = functools.partial(create, size, interpolation="bilinear", normalize=False)
    test = varied = make(crop_pct=1.0 if size < 128 else 7 / 8)  # small ones have no edges to cut
    policy = options.augment if options.augment != "crop" else None
    if policy != "none":
        try:
            varied = make(is_training=True, color_jitter=None, auto_augment=policy)
        except (AssertionError, ValueError, KeyError) as error:
            raise UsageError(
                f"--augment {policy} is neither none, nor crop, nor a policy of timm's, such as "
                f"rand-m9-mstd0.5 ({words_of(error)})"
            ) from error
        for op in (op for step in varied.transforms for op in getattr(step, "ops", ())):
            if "Posterize" in op.name:  # Pillow 13 refuses zero bits
                op.level_fn = lambda *x, level=op.level_fn: (max(1, level(*x)[0]),)
    if options.erase:
        grey = [round(value) for value in _MEAN]  # standardised, this is zero
        varied = v2.Compose([varied, v2.RandomErasing(options.erase, value=grey)])
    kinds = (v2.MixUp, options.mixup), (v2.CutMix, options.cutmix)
    mixing = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]
    return {TRAIN: (varied, v2.RandomChoice(mixing) if mixing else None), TEST: (test, None)}


def open_data(options: Options) -> Source:
    """Open the data that `--data` names."""
    try:
        folder = Path(options.data).expanduser()
        if options.data != EMBEDDED and folder.is_dir():
            return make_pictures(options, *_of_folder(folder, options.val))
        if options.val is not None and options.data.startswith((EMBEDDED, "torch/", "hfds/")):
            raise UsageError(_HAS_TESTS)
        if options.data != EMBEDDED:
            return make_pictures(options, *_of_library(options))
        varied = options.augment not in (None, "none")
        if options.image_size or varied or options.erase or options.mixup or options.cutmix:
            names = "--image-size, --augment, --erase, --mixup and --cutmix"
            raise UsageError(f"it is used as it is: {names} are for pictures in files")
        return load()
    except UsageError as error:
        raise UsageError(f"--data {options.data}: {error}") from error


def make_pictures(options: Options, train: Any, test: Any, classes: Sequence[str]) -> Source:
    """Make a data set of pictures; by default their size is the first one's, at most 224."""
    size = options.image_size or min(224, _first_size(train))
    _transforms(size, options, len(classes))  # raises now if a library is missing
    shape, statistics = (3, size, size), (torch.tensor(_MEAN), torch.tensor(_STD))
    return Source(options.data, train, test, tuple(classes), shape, *statistics, options)


def _first_size(pairs: Any) -> int:
    """Return the shorter side of the first readable picture."""
    for row in range(len(pairs)):
        with contextlib.suppress(Exception):  # the feed reports it later
            return int(min(_opened(pairs, row)[0].size))
    raise UsageError("no image can be read")


def _of_folder(path: Path, val: float | None) -> tuple[Files, Files, list[str]]:
    train = path / TRAIN if (path / TRAIN).is_dir() else path
    tests = [path / part for part in (TEST, "val") if train != path and (path / part).is_dir()]
    names, *of_tests = (
        [e.name for e in sorted(part.iterdir()) if e.is_dir() and not e.name.startswith(".")]
        for part in (train, *tests[:1])
    )
    odd = sorted({*names}.symmetric_difference(*of_tests)) if tests else []
    for is_wrong, words in (
        (val is not None and tests, _HAS_TESTS),
        (not names, f"{train} has no folders in it: it needs one for each class"),
        (val is None and not tests, _NO_SPLIT),
        (odd, f"train/ and its test folder have different classes: {', '.join(odd)}"),
    ):
        if is_wrong:
            raise UsageError(words)
    files = find_files(train, names)
    if val is None:
        return files, find_files(tests[0], names, allow_empty=True), names
    # Each class is split, in the same way in every run.
    parts: tuple[list[Any], list[Any]] = ([], [])
    generator = torch.Generator().manual_seed(0)
    for label, count in enumerate(files.labels.bincount().tolist()):
        number = max(1, round(count * val))
        if number == count:
            name = train / names[label]
            raise UsageError(f"{name} has too few pictures ({count}) for --val {val}")
        is_test = torch.randperm(count, generator=generator).argsort() < number
        for row, chosen in zip((files.labels == label).nonzero(), is_test.tolist(), strict=True):
            parts[chosen].append(files[int(row)])
    return Files(parts[0]), Files(parts[1]), names


def find_files(folder: Path, classes: Sequence[str], allow_empty: bool = False) -> Files:
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
        raise UsageError(f"{folder} contains no pictures, whose names end in .jpg, .png, …")
    return Files(samples)


def _of_library(options: Options) -> tuple[Any, Any, list[str]]:
    if not options.data.startswith(("torch/", "hfds/")):
        raise UsageError(
            "there is no folder with train/ and test/ (or val/), nor one of classes for --val; "
            f"known by name are {EMBEDDED}, torch/NAME and hfds/NAME"
        )
    if not options.download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
    create, root = library("timm.data").create_dataset, options.data_root

    def opened(split: str, *others: str) -> Any:
        try:
            found = create(options.data, str(root), split, download=options.download)
            return getattr(found, "reader", found)
        except Exception as error:
            if others:
                return opened(*others)
            hint = f"looked in --data-root {root}; --download fetches it"
            if isinstance(error, ImportError):
                hint = f"{_INSTALL} -e '.[datasets]' where you cloned scatterpar"
            raise UsageError(f"{words_of(error):.300} ({hint})") from error

    train, test = opened(TRAIN), opened(TEST, "validation", "val")
    names = getattr(train, "classes", None) or getattr(train, "class_to_idx", None)
    if not names:
        raise UsageError("it does not say what its classes are called")
    return train, test, [*map(str, names)]
