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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, TensorDataset

from scatterpar.train.command_line import (
    EMBEDDED,
    Options,
    UsageError,
    option_of,
    words_of,
)
from scatterpar.train.csv_files import read_table
from scatterpar.train.data_parts import (
    TEST,
    TRAIN,
    VAL,
    Listing,
    Pictures,
    first_names,
    make_parts,
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
_MEAN = torch.tensor([123.675, 116.28, 103.53])
_STD = torch.tensor([58.395, 57.12, 57.375])
_OF_FILES = ("val", "image_size", "augment", "erase", "mixup", "cutmix")  # options
_LARGEST_SIDE = 224  # by default; what timm's models take
_SMALLEST_SIDE = 32  # by default; networks for pictures halve the sides five times
_SAMPLE = 100  # pictures whose size is looked at
_SHOWN_CLASSES = 20
_READERS: dict[str, Callable[..., Listing]] = {
    ".csv": read_table,
    ".tsv": read_table,
    PARQUET: read_hub,
}
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


@dataclass(kw_only=True)
class Source(Pictures):
    """Images to train and to test on, with the mean and deviation of their pixels per
    channel.

    Attributes:
        name: what `--data` names.
        image_shape: channels, height and width of each image.
        mean: the mean of the pixels, per channel.
        std: the standard deviation of the pixels, per channel.
        options: the options that say how pictures are read and varied.
    """

    name: str
    image_shape: Shape
    mean: Tensor = _MEAN
    std: Tensor = _STD
    options: Options = field(default_factory=Options)

    @property
    def tested(self) -> str:
        """The name of the part to test on after each epoch."""
        return VAL if VAL in self.parts else TEST

    @property
    def in_memory(self) -> bool:
        """Whether images are tensors, which need neither workers nor transforms."""
        return isinstance(self.sources, Tensor)

    def __getitem__(self, request: BatchRequest) -> Images:
        """Read the images of a request, or of a piece of one."""
        part, rows, epoch = request
        places = self.parts[part][rows]
        labels = self.labels[places]
        if self.in_memory:
            return Images(self.sources[places], labels)
        size = self.image_shape[1]
        classes = len(self.class_names)
        transform, mix = _transforms(part == TRAIN, size, self.options, classes)
        # Bytes are a fourth of the memory of floats, on the way to the device, too.
        images = torch.empty(len(rows), *self.image_shape, dtype=torch.uint8)
        readable = list[int]()
        broken = list[tuple[str, str]]()
        for number, place in enumerate(places.tolist()):
            row = int(rows[number])
            name = f"{self.name} ({part}), image {row}"
            try:
                source = self.sources[place]
                name = source if isinstance(source, str) else name
                picture = as_rgb(_open(source))
            except Exception as error:  # Pillow's decoders raise many kinds
                broken.append((name, words_of(error)))
                continue
            # timm draws from Python's generator, and torchvision from torch's.
            seed_host("image", self.options.seed, epoch, row)
            images[number] = transform(picture)
            readable.append(number)
        images = images[readable]
        labels = labels[readable]
        if mix is not None and readable:
            seed_host("piece", self.options.seed, epoch, int(rows[0]))
            mixed, labels = mix(images.float(), labels)
            images = mixed.round_().to(torch.uint8)
        return Images(images, labels, broken)

    def __str__(self) -> str:
        counts = [f"{len(self.parts[part]):,} {_PURPOSES[part]}" for part in self.parts]
        counts.append(f"{len(self.class_names)} classes")
        shape = " x ".join(map(str, self.image_shape))
        counts.append(shape if self.in_memory else f"brought to {shape}")
        return f"{self.name}: {', '.join(counts)}"

    def classes_in_words(self) -> str:
        """Return the names of the classes, with the number of their images per part."""
        per_class = zip(self.class_names, *self.class_counts.values(), strict=True)
        texts = []
        for name, *numbers in per_class:
            texts.append(f"{name} {' + '.join(f'{number:,}' for number in numbers)}")
        return f"images of each class: {first_names(texts, _SHOWN_CLASSES)}"


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
    np.random.seed(seed)
    return seed


def load() -> Source:
    """Load the images that are included; a part of them is for testing."""
    split = read_split(Path(__file__).parent / "embedded", "t10k")
    images, labels = split.tensors
    train, test = torch.arange(len(images)).split(_EMBEDDED_TRAIN)
    std, mean = torch.std_mean(images[train].float(), (0, 2, 3), correction=0)
    return Source(
        images,
        labels,
        {TRAIN: train, TEST: test},
        tuple(_FASHION.split(", ")),
        name="embedded Fashion-MNIST",
        image_shape=(1, 28, 28),
        mean=mean,
        std=std,
    )


def read_split(folder: Path, part: str) -> TensorDataset:
    """Read 28 x 28 images and labels from MNIST's IDX files: a header, then single
    bytes.
    """
    images = _read_bytes(folder / f"{part}-images-idx3-ubyte.gz", header=16)
    labels = _read_bytes(folder / f"{part}-labels-idx1-ubyte.gz", header=8)
    return TensorDataset(images.view(-1, 1, 28, 28), labels.long())


def _read_bytes(path: Path, header: int) -> Tensor:
    content = bytearray(gzip.decompress(path.read_bytes()))
    return torch.frombuffer(content, dtype=torch.uint8, offset=header)


# Kept in each worker, because every piece of 64 images asks for them.
@functools.cache
def _transforms(
    is_varied: bool, size: int, options: Options, classes: int
) -> tuple[Callable[[Any], Tensor], Callable[..., Any] | None]:
    """Build what turns a picture into a tensor of uint8; and what mixes the pictures of
    a piece, or None. Pictures to train on are varied at random.
    """
    v2 = library("torchvision.transforms.v2")
    transform: Any = functools.partial(as_pixels, size=size)
    if not is_varied:
        return transform, None
    if options.augment != "none":
        transform = _augmentation(size, options.augment)
    if options.erase:
        grey = _MEAN.round().int().tolist()  # zero, once standardised
        transform = v2.Compose([transform, v2.RandomErasing(options.erase, value=grey)])
    mixing = []
    if options.mixup:
        mixing.append(v2.MixUp(alpha=options.mixup, num_classes=classes))
    if options.cutmix:
        mixing.append(v2.CutMix(alpha=options.cutmix, num_classes=classes))
    return transform, v2.RandomChoice(mixing) if mixing else None


def _augmentation(size: int, augment: str) -> Any:
    """Build timm's transform of a random crop, and its policy if one is named."""
    policy = None if augment == "crop" else augment
    for section in augment.split("-")[1:]:
        # timm ignores a section without a number, such as the end of rand-m9-mst.
        if not re.match("t|[a-z]+[0-9]", section):
            raise UsageError(
                f"--augment {policy}: its section {section} has no number; one of "
                "timm's policies is rand-m9-mstd0.5"
            )
    # Not normalised: the model does it on the device, to which bytes are copied.
    try:
        varied = library("timm.data").create_transform(
            size,
            is_training=True,
            color_jitter=None,
            auto_augment=policy,
            interpolation="bilinear",
            normalize=False,
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise UsageError(
            f"--augment {policy} is neither none, nor crop, nor a policy of timm's, "
            f"such as rand-m9-mstd0.5 ({words_of(error)})"
        ) from error
    for transform in varied.transforms:
        for operation in getattr(transform, "ops", ()):
            if "Posterize" in operation.name:
                operation.level_fn = functools.partial(
                    _at_least_one_bit, operation.level_fn
                )
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
        if options.data.startswith("torch/") and not Path(options.data).exists():
            pictures = _of_torchvision(options)
        else:
            pictures = make_parts(_listing(options), options.val)
    except (UsageError, OSError) as error:
        raise UsageError(f"--data {options.data}: {words_of(error)}") from error
    return make_source(options, pictures)


def _listing(options: Options) -> Listing:
    """List the pictures of a folder, a table, or a data set of Hugging Face."""
    path = Path(options.data).expanduser()
    if path.is_dir():
        reader = read_hub if is_saved(path) else read_folders
        return reader(path, options)
    if path.is_file():
        ending = path.suffix.lower()
        if ending not in _READERS:
            raise UsageError(f"it is no folder and no table ({', '.join(_READERS)})")
        return _READERS[ending](path, options)
    if options.data.startswith("hfds/"):
        return read_hub(options.data.removeprefix("hfds/"), options)
    # A misspelt path looks like the name of a library's set.
    near = suggestion(path.name, [entry.name for entry in path.parent.glob("*")])
    remedy = f"known by name are {EMBEDDED}, torch/NAME and hfds/NAME"
    if options.resume:
        remedy = "--data FOLDER names where it is now"
    raise UsageError(f"there is no such folder{near}; {remedy}")


def _refuse_options_of_files(options: Options) -> None:
    for name in _OF_FILES:
        if getattr(options, name) not in (None, 0.0, "crop", "none"):
            raise UsageError(
                f"it is used as it is: {option_of(name)} is for pictures in files"
            )


def make_source(options: Options, pictures: Pictures) -> Source:
    """Make a source of pictures, all brought to one size."""
    size = options.image_size or _default_size(options.model, pictures)
    # The error of a missing library comes now, and not from a worker.
    _transforms(True, size, options, len(pictures.class_names))
    return Source(
        **vars(pictures),
        name=options.data,
        image_shape=(3, size, size),
        options=options,
    )


def _open(source: Any) -> Any:
    """Open a file, or return a library's picture."""
    if isinstance(source, tuple):  # torchvision's sets have the label beside it
        source, _ = source
    return open_picture(source)


def _default_size(model: str, pictures: Pictures) -> int:
    """Return 224 for timm's models, else the median of the shorter sides of a sample,
    from 32 to 224.
    """
    if model.startswith("timm:"):
        return _LARGEST_SIDE
    sides = list[int]()
    rows = pictures.parts[TRAIN]
    # Over all classes, as pictures are sorted by class.
    for row in rows[:: -(-len(rows) // _SAMPLE)].tolist():
        # The feed reports a picture that cannot be read.
        with contextlib.suppress(Exception):
            sides.append(min(_open(pictures.sources[row]).size))
    median = round(statistics.median(sides or [_LARGEST_SIDE]))
    return max(_SMALLEST_SIDE, min(median, _LARGEST_SIDE))


def _of_torchvision(options: Options) -> Pictures:
    """Open a data set of torchvision by timm's name."""
    if options.val is not None:
        raise UsageError("it has images to test on; leave out --val")
    create_dataset = library("timm.data").create_dataset
    root = str(options.data_root)
    sets = []
    try:
        for part in (TRAIN, TEST):
            pairs = create_dataset(options.data, root, part, download=options.download)
            sets.append(pairs)
        class_names = [str(name) for name in sets[0].classes]
    except Exception as error:
        raise UsageError(
            f"{words_of(error):.300} (looked in --data-root {root}; --download fetches "
            "it)"
        ) from error
    labels = torch.cat([torch.as_tensor(pairs.targets) for pairs in sets])
    train, test = torch.arange(len(labels)).split([len(pairs) for pairs in sets])
    parts = {TRAIN: train, TEST: test}
    return Pictures(ConcatDataset(sets), labels, parts, tuple(class_names))
