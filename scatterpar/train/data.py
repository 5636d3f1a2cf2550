"""Images to train and to test on: the included ones, and pictures in files.

The random variation of a picture depends only on the seed, the epoch and its row: any
worker reads the same picture, also after a resume within an epoch.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from scatterpar.train.command_line import (
    EMBEDDED,
    Options,
    UsageError,
    option_of,
    words_of,
)
from scatterpar.train.csv_files import ENDINGS, read_table
from scatterpar.train.data_parts import (
    TEST,
    TRAIN,
    VAL,
    DataParts,
    first_names,
)
from scatterpar.train.folders import read_folders
from scatterpar.train.hub import PARQUET, is_saved, read_hub
from scatterpar.train.libraries import library, suggestion
from scatterpar.train.pictures import as_pixels, as_rgb, open_picture

Shape = tuple[int, int, int]  # channels, height, width
_FASHION = (
    "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, "
    "Ankle boot"
)
_EMBEDDED_TRAIN = 8192  # of its 10,000 images; the others are for testing
# ImageNet's mean and standard deviation, for pixels from 0 to 255.
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)
_OF_FILES = ("val", "image_size", "augment", "erase", "mixup", "cutmix")  # options
_LARGEST_SIDE = 224  # by default; what timm's models take
_SMALLEST_SIDE = 32  # by default; networks for pictures halve the sides five times
_SAMPLE = 100  # pictures whose size is looked at
_SHOWN_CLASSES = 20
_PURPOSES = {
    TRAIN: "images to train on",
    VAL: "to choose the best epoch",
    TEST: "to test",
}


class BatchRequest(NamedTuple):
    """Rows of a part, `TRAIN`, `VAL` or `TEST`, to be read as one batch, varied as in
    that epoch.
    """

    part: str
    rows: Any  # a tensor; a list of a piece that is sent to a worker
    epoch: int = 0


class Images(NamedTuple):
    """Images that were read, and the names of unreadable ones, each with the reason.

    Images are uint8 (rows, channels, height, width). Labels are int64 (rows,), or
    float32 (rows, classes) if images were mixed with each other.
    """

    images: Tensor
    labels: Tensor
    broken: Sequence[tuple[str, str]] = ()


@dataclass
class Source:
    """Images to train and to test on, with the mean and deviation of their pixels per
    channel.

    Each part is images and labels in memory (a `TensorDataset`), or `Pictures`,
    or a library's pairs of a picture and a label.

    Attributes:
        name: what `--data` names.
        parts: as those of `DataParts`.
        class_names: the names of the classes, by label.
        image_shape: channels, height and width of each image.
        mean: the mean of the pixels, per channel.
        std: the standard deviation of the pixels, per channel.
        options: the options that say how pictures are read and varied.
        notes: what else a reader of the results has to know, a line each.
    """

    name: str
    parts: dict[str, Any]
    class_names: tuple[str, ...]
    image_shape: Shape
    mean: Tensor
    std: Tensor
    options: Options = field(default_factory=Options)
    notes: list[str] = field(default_factory=list)

    @property
    def tested(self) -> str:
        """The name of the part to test on after each epoch."""
        return VAL if VAL in self.parts else TEST

    @property
    def in_memory(self) -> bool:
        """Whether images are tensors, which need neither workers nor transforms."""
        return isinstance(self.parts[TEST], TensorDataset)

    @functools.cached_property
    def class_counts(self) -> dict[str, list[int]]:
        """The number of images of each class, by part; empty if labels are not known
        before a picture is read.
        """
        counts = {}
        for name, part in self.parts.items():
            labels = _labels(part)
            if labels is None:
                return {}
            numbers = torch.bincount(labels, minlength=len(self.class_names))
            counts[name] = numbers.tolist()
        return counts

    def __getitem__(self, request: BatchRequest) -> Images:
        """Read the images of a request, or of a piece of one."""
        pairs = self.parts[request.part]
        if self.in_memory:
            return Images(*pairs[request.rows])
        seed = self.options.seed
        size = self.image_shape[1]
        transforms = _transforms(size, self.options, len(self.class_names))
        varied = request.part == TRAIN
        transform = transforms.varied if varied else transforms.plain
        rows = torch.as_tensor(request.rows).tolist()
        # Bytes are a fourth of the memory of floats, on the way to the device, too.
        images = torch.empty(len(rows), *self.image_shape, dtype=torch.uint8)
        labels = list[int]()
        broken = list[tuple[str, str]]()
        for row in rows:
            name = f"{self.name} ({request.part}), image {row}"
            try:
                opened, label = pairs[row]
                name = opened if isinstance(opened, str) else name
                picture = as_rgb(open_picture(opened))
            except Exception as error:  # Pillow's decoders raise many kinds
                broken.append((name, words_of(error)))
                continue
            # timm draws from Python's generator, and torchvision from torch's.
            seed_host("image", seed, request.epoch, row)
            images[len(labels)] = transform(picture)
            labels.append(int(label))
        images = images[: len(labels)]
        targets = torch.tensor(labels, dtype=torch.int64)
        if varied and transforms.mix is not None and labels:
            seed_host("piece", seed, request.epoch, rows[0])
            mixed, targets = transforms.mix(images.float(), targets)
            images = mixed.round_().to(torch.uint8)
        return Images(images, targets, broken)

    def __str__(self) -> str:
        counts = []
        for name, part in self.parts.items():
            counts.append(f"{len(part):,} {_PURPOSES[name]}")
        counts.append(f"{len(self.class_names)} classes")
        shape = " x ".join(map(str, self.image_shape))
        counts.append(shape if self.in_memory else f"brought to {shape}")
        return f"{self.name}: {', '.join(counts)}"

    def classes_in_words(self) -> str:
        """Return the names of the classes, with the number of their images per part."""
        if not self.class_counts:
            return f"classes: {first_names(self.class_names, _SHOWN_CLASSES)}"
        per_class = zip(*self.class_counts.values(), strict=True)
        texts = []
        for name, numbers in zip(self.class_names, per_class, strict=True):
            texts.append(f"{name} {' + '.join(f'{number:,}' for number in numbers)}")
        return f"images of each class: {first_names(texts, _SHOWN_CLASSES)}"


def _labels(part: Any) -> Tensor | None:
    if isinstance(part, TensorDataset):
        return part.tensors[1]
    labels = getattr(part, "labels", None)
    if labels is None:
        labels = getattr(part, "targets", None)  # of torchvision
    return None if labels is None else torch.as_tensor(labels)


def seed_of(*parts: object) -> int:
    """Return a seed that is a function of the parts. It has 32 bits: torch ignores
    others.
    """
    return random.Random(" ".join(map(str, parts))).getrandbits(32)


def seed_host(*parts: object) -> int:
    """Seed Python, NumPy, and torch on the CPU with a function of the parts, and return
    it.
    """
    seed = seed_of(*parts)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # If it is not imported, nothing draws from it, and its import takes long.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return seed


def load() -> Source:
    """Load the images that are included; a part of them is for testing."""
    images = read_split(Path(__file__).parent / "embedded", "t10k")
    train = TensorDataset(*images[:_EMBEDDED_TRAIN])
    parts = {TRAIN: train, TEST: TensorDataset(*images[_EMBEDDED_TRAIN:])}
    pixels = train.tensors[0].float()
    std, mean = torch.std_mean(pixels, (0, 2, 3), correction=0)
    name = "embedded Fashion-MNIST"
    class_names = tuple(_FASHION.split(", "))
    return Source(name, parts, class_names, (1, 28, 28), mean, std)


def read_split(folder: Path, part: str) -> TensorDataset:
    """Read 28 x 28 images and labels from MNIST's IDX files: a header, then single
    bytes.
    """
    images = _read_bytes(folder / f"{part}-images-idx3-ubyte.gz", header=16)
    labels = _read_bytes(folder / f"{part}-labels-idx1-ubyte.gz", header=8)
    return TensorDataset(images.view(-1, 1, 28, 28), labels.long())


def _read_bytes(path: Path, header: int) -> Tensor:
    content = gzip.decompress(path.read_bytes())
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8)


class Transforms(NamedTuple):
    """How pictures become tensors of uint8.

    Attributes:
        plain: of a picture to test on.
        varied: of a picture to train on, drawn at random.
        mix: of a piece of pictures to train on, or None.
    """

    plain: Callable[[Any], Tensor]
    varied: Callable[[Any], Tensor]
    mix: Callable[..., Any] | None


# Kept in each worker, because every piece of 64 images asks for them.
@functools.cache
def _transforms(size: int, options: Options, classes: int) -> Transforms:
    """Build torchvision's and timm's transforms for these options."""
    create_transform = library("timm.data").create_transform
    v2 = library("torchvision.transforms.v2")
    # Not normalised: the model does it on the device, to which bytes are copied.
    create = functools.partial(
        create_transform, size, interpolation="bilinear", normalize=False
    )
    plain = functools.partial(as_pixels, size=size)
    varied: Any = plain
    if options.augment != "none":
        varied = _augmentation(create, options.augment)
    if options.erase:
        grey = [round(value) for value in _MEAN]  # zero, once standardised
        erasing = v2.RandomErasing(options.erase, value=grey)
        varied = v2.Compose([varied, erasing])
    mixing = []
    if options.mixup:
        mixing.append(v2.MixUp(alpha=options.mixup, num_classes=classes))
    if options.cutmix:
        mixing.append(v2.CutMix(alpha=options.cutmix, num_classes=classes))
    mix = v2.RandomChoice(mixing) if mixing else None
    return Transforms(plain, varied, mix)


def _augmentation(create: Callable[..., Any], augment: str) -> Any:
    """Build timm's transform of a random crop, and its policy if one is named."""
    policy = None if augment == "crop" else augment
    for section in (policy or "").split("-")[1:]:
        # timm ignores a section without a number, such as the end of rand-m9-mst.
        if not re.match("t|[a-z]+[0-9]", section):
            raise UsageError(
                f"--augment {policy}: its section {section} has no number; one of "
                "timm's policies is rand-m9-mstd0.5"
            )
    try:
        varied = create(is_training=True, color_jitter=None, auto_augment=policy)
    except (AssertionError, ValueError, KeyError) as error:
        raise UsageError(
            f"--augment {policy} is neither none, nor crop, nor a policy of timm's, "
            f"such as rand-m9-mstd0.5 ({words_of(error)})"
        ) from error
    for transform in varied.transforms:
        for operation in getattr(transform, "ops", ()):
            if "Posterize" in operation.name:
                level = operation.level_fn
                operation.level_fn = functools.partial(_at_least_one_bit, level)
    return varied


def _at_least_one_bit(level: Callable[..., tuple[int]], *arguments: Any) -> tuple[int]:
    """Return the level of timm's Posterize, at least one bit: Pillow 13 refuses zero
    bits.
    """
    (bits,) = level(*arguments)
    return (max(1, bits),)


def open_data(options: Options) -> Source:
    """Open the data that `--data` names."""
    try:
        if options.data == EMBEDDED:
            _refuse_options_of_files(options)
            return load()
        parts = _open_parts(options)
    except (UsageError, OSError) as error:
        raise UsageError(f"--data {options.data}: {words_of(error)}") from error
    return make_pictures(options, parts)


def _open_parts(options: Options) -> DataParts:
    path = Path(options.data).expanduser()
    if path.is_dir():
        if is_saved(path):
            return read_hub(str(path), options)
        return read_folders(path, options)
    library_name, _, name = options.data.partition("/")
    if path.is_file():
        if path.suffix.lower() in ENDINGS:
            return read_table(path, options)
        if path.suffix.lower() == PARQUET:
            return read_hub(str(path), options)
        endings = ", ".join([*ENDINGS, PARQUET])
        raise UsageError(f"it is no folder and no table ({endings})")
    if library_name == "hfds":
        return read_hub(name, options)
    if library_name == "torch":
        return _of_torchvision(options)
    # A misspelt path looks like the name of a library's set.
    near = suggestion(path.name, [entry.name for entry in path.parent.glob("*")])
    if options.resume:
        raise UsageError(
            f"there is no such folder{near}; --data FOLDER names where it is now"
        )
    raise UsageError(
        f"there is no such folder{near}; known by name are {EMBEDDED}, torch/NAME and "
        "hfds/NAME"
    )


def _refuse_options_of_files(options: Options) -> None:
    for name in _OF_FILES:
        if getattr(options, name) not in (None, 0.0, "crop", "none"):
            raise UsageError(
                f"it is used as it is: {option_of(name)} is for pictures in files"
            )


def make_pictures(options: Options, data_parts: DataParts) -> Source:
    """Make a data set of pictures, all brought to one size."""
    parts = data_parts.parts
    size = options.image_size or _default_size(options.model, parts[TRAIN])
    class_names = tuple(data_parts.class_names)
    # The error of a missing library comes now, and not from a worker.
    _transforms(size, options, len(class_names))
    return Source(
        name=options.data,
        parts=parts,
        class_names=class_names,
        image_shape=(3, size, size),
        mean=torch.tensor(_MEAN),
        std=torch.tensor(_STD),
        options=options,
        notes=data_parts.notes,
    )


def _default_size(model: str, pairs: Any) -> int:
    """Return 224 for timm's models, else the median of the shorter sides of a sample,
    from 32 to 224.
    """
    if model.startswith("timm:"):
        return _LARGEST_SIDE
    sides = []
    # Over all classes, as pairs are sorted by class.
    stride = -(-len(pairs) // _SAMPLE)
    for row in range(0, len(pairs), stride):
        # The feed reports a picture that cannot be read.
        with contextlib.suppress(Exception):
            picture = open_picture(pairs[row][0])
            sides.append(min(picture.size))
    if not sides:
        return _LARGEST_SIDE
    median = round(statistics.median(sides))
    return max(_SMALLEST_SIDE, min(median, _LARGEST_SIDE))


def _of_torchvision(options: Options) -> DataParts:
    """Open a data set of torchvision by timm's name."""
    if options.val is not None:
        raise UsageError("it has images to test on; leave out --val")
    train = _open_split(options, TRAIN)
    names = getattr(train, "classes", None) or getattr(train, "class_to_idx", None)
    if not names:
        raise UsageError("it does not say what its classes are called")
    class_names = [str(name) for name in names]
    return DataParts({TRAIN: train, TEST: _open_split(options, TEST)}, class_names)


def _open_split(options: Options, part: str) -> Any:
    """Return pairs of a picture and a label."""
    create_dataset = library("timm.data").create_dataset
    root = options.data_root
    try:
        return create_dataset(options.data, str(root), part, download=options.download)
    except Exception as error:
        raise UsageError(
            f"{words_of(error):.300} (looked in --data-root {root}; --download fetches "
            "it)"
        ) from error
