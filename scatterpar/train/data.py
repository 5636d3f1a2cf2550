"""Images to train and to test on: the included ones, and those that timm lists.

photos/train/cat/1.jpg        photos/cat/1.jpg      with --val 0.1
photos/val/cat/2.jpg          photos/dog/2.jpg
photos/test/cat/3.jpg

timm finds files and labels, and makes the transforms. Opening a picture is this
package's (`pictures.py`). The random variation of a picture depends only on the seed,
the epoch and its row: any worker reads the same picture, also after a resume within an
epoch.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import random
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from scatterpar.train.command_line import (
    EMBEDDED,
    LOCK_FILE,
    METRICS_FILE,
    Options,
    UsageError,
    option_of,
    words_of,
)
from scatterpar.train.libraries import installed, library, suggestion
from scatterpar.train.pictures import as_pixels, as_rgb, open_picture

ImageShape = tuple[int, int, int]  # channels, height, width
TRAIN = "train"
VAL = "val"
TEST = "test"
# The folders of each part, as timm's search finds them.
_FOLDERS = {
    TRAIN: ("train", "training"),
    VAL: ("val", "valid", "validation", "eval", "evaluation"),
    TEST: ("test",),
}
_SPLITS = {TRAIN: "train", VAL: "validation", TEST: "test"}  # of Hugging Face's sets
_LAYOUT = (
    "a data set is train/CLASS/1.jpg with val/CLASS/2.jpg, or CLASS/1.jpg with --val "
    "0.1"
)
_STREAMS = ("wds", "hfids", "tfds")  # timm's sets without names and numbers
_TORCHVISION_ROOT = "data"  # as in the examples of its documentation
_MAC_COPY = "__MACOSX"  # a folder that macOS adds to its archives
_ENDINGS = (  # of files that are read: timm's, and others that Pillow opens
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
)
_FASHION = (
    "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, "
    "Ankle boot"
)
_EMBEDDED_TRAIN = 8192  # of its 10,000 images; the others are for testing
# ImageNet's mean and standard deviation, for pixels from 0 to 255.
_MEAN = torch.tensor([123.675, 116.28, 103.53])
_STD = torch.tensor([58.395, 57.12, 57.375])
_LARGEST_SIDE = 224  # by default; what most of timm's models take
_SMALLEST_SIDE = 32  # by default; networks for pictures halve the sides five times
_SAMPLE = 100  # pictures whose size is looked at
_SHOWN = 20  # names of classes in a line
_PURPOSES = {
    TRAIN: "images to train on",
    VAL: "to test each epoch",
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

    Images are uint8 (rows, channels, height, width). Labels are int64 (rows,).
    """

    images: Tensor
    labels: Tensor
    broken: Sequence[tuple[str, str]] = ()


class Broken(NamedTuple):
    """A picture that cannot be read: its part, its name there, its file, and why."""

    part: str
    name: str
    file: str
    reason: str


class DataPart(NamedTuple):
    """Pictures of one purpose.

    Attributes:
        pictures: images in memory (a tensor), names of files, or a data set of timm's.
        rows: their rows in `pictures`.
        labels: the number of the class of each of them.
        names: the name of each of them, below the folder of the set.
    """

    pictures: Any
    rows: Tensor
    labels: Tensor
    names: Sequence[str]

    def selected(self, is_chosen: Tensor) -> DataPart:
        """Return the chosen pictures of the part."""
        names = [
            name for name, chosen in zip(self.names, is_chosen, strict=True) if chosen
        ]
        return DataPart(
            self.pictures, self.rows[is_chosen], self.labels[is_chosen], names
        )


@dataclass(kw_only=True)
class Source:
    """Images to train and to test on.

    Attributes:
        name: what `--data` names.
        parts: the pictures of `TRAIN`; of `VAL`, which chooses the best epoch; and of
            `TEST`, if it is tested once, at the end. The included images have no
            `VAL`.
        class_names: the names of the classes, by label.
        image_shape: channels, height and width of each image.
        mean: the mean of the pixels, per channel.
        std: the standard deviation of the pixels, per channel.
        notes: what else a reader of the results has to know, a line each.
        options: the options that say how pictures are read and varied.
    """

    name: str
    parts: dict[str, DataPart]
    class_names: Sequence[str]
    image_shape: ImageShape = (3, 0, 0)
    mean: Tensor = field(default_factory=lambda: _MEAN)
    std: Tensor = field(default_factory=lambda: _STD)
    notes: list[str] = field(default_factory=list)
    options: Options = field(default_factory=Options)

    @property
    def tested(self) -> str:
        """The name of the part to test on after each epoch."""
        return VAL if VAL in self.parts else TEST

    @property
    def in_memory(self) -> bool:
        """Whether images are tensors, which need neither workers nor transforms."""
        return isinstance(self.parts[self.tested].pictures, Tensor)

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """The number of images of each class, by part."""
        classes = len(self.class_names)
        counts = {}
        for name, part in self.parts.items():
            counts[name] = part.labels.bincount(minlength=classes).tolist()
        return counts

    @property
    def digest(self) -> str:
        """A digest of the names of all pictures, with their parts and classes."""
        digest = hashlib.sha256()
        for part, (_, _, labels, names) in self.parts.items():
            for name, label in zip(names, labels.tolist(), strict=True):
                line = f"{part} {self.class_names[label]} {name}\n"
                # Of names that are no Unicode, Python has the bytes as surrogates.
                digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def __getitem__(self, request: BatchRequest) -> Images:
        """Read the images of a request, or of a piece of one."""
        part_name, rows, epoch = request
        part = self.parts[part_name]
        labels = part.labels[rows]
        if self.in_memory:
            return Images(part.pictures[part.rows[rows]], labels)
        size = self.image_shape[1]
        transform = _transform(part_name == TRAIN, size, self.options.augment)
        # Bytes are a fourth of the memory of floats, on the way to the device, too.
        images = torch.empty(len(rows), *self.image_shape, dtype=torch.uint8)
        readable = list[int]()
        broken = list[tuple[str, str]]()
        for number, row in enumerate(map(int, rows)):
            try:
                picture = as_rgb(_open(part, row))
            except Exception as error:  # Pillow's decoders raise many kinds
                broken.append((self.name_of(part_name, row), words_of(error)))
                continue
            # timm draws from Python's generator, and torchvision from torch's.
            seed_host("image", self.options.seed, epoch, row)
            images[number] = transform(picture)
            readable.append(number)
        return Images(images[readable], labels[readable], broken)

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes read by number.
        parts = {name: part._replace(names=()) for name, part in self.parts.items()}
        return vars(self) | {"parts": parts}

    def name_of(self, part_name: str, row: int) -> str:
        """Return the name of a picture in an error: that of its file, if it has one."""
        part = self.parts[part_name]
        if isinstance(part.pictures, list):
            return str(part.pictures[int(part.rows[row])])
        return f"{self.name} ({part_name}), image {row}"

    def broken_pictures(self, workers: int | None) -> Iterator[Broken | None]:
        """Decode each picture once. Yields None for each readable one."""
        places = [
            (name, row)
            for name, part in self.parts.items()
            for row in range(len(part.rows))
        ]
        # Threads suffice: Pillow decodes without the GIL.
        with ThreadPoolExecutor(max(1, workers or os.cpu_count() or 1)) as threads:
            yield from threads.map(lambda place: self._problem(*place), places)

    def _problem(self, part_name: str, row: int) -> Broken | None:
        try:
            picture = _open(self.parts[part_name], row)
            # A JPEG file is decoded at an eighth of its size, which is faster.
            picture.draft(None, (1, 1))
            as_rgb(picture)
        except Exception as error:  # Pillow's decoders raise many kinds
            name = self.parts[part_name].names[row]
            file = self.name_of(part_name, row)
            return Broken(part_name, name, file, words_of(error))
        return None

    def leave_out(self, pictures: Sequence[Broken]) -> None:
        """Remove pictures."""
        absent = {(picture.part, picture.name) for picture in pictures}
        if not absent:
            return
        for part_name, part in self.parts.items():
            are_left = [(part_name, name) not in absent for name in part.names]
            self.parts[part_name] = part.selected(torch.tensor(are_left))

    def __str__(self) -> str:
        counts = []
        for name, part in self.parts.items():
            counts.append(f"{len(part.rows):,} {_PURPOSES[name]}")
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
        return f"images of each class: {first_names(texts)}"


def first_names(names: Sequence[str]) -> str:
    """Return a list of names as text: the first ones, and how many follow."""
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f", and {len(names) - _SHOWN:,} more"
    return text


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
    # The images are in random order, so that both parts have all classes.
    train, test = torch.arange(len(images)).split(_EMBEDDED_TRAIN)
    std, mean = torch.std_mean(images[train].float(), (0, 2, 3), correction=0)
    parts = {}
    for name, rows in ((TRAIN, train), (TEST, test)):
        parts[name] = DataPart(images, rows, labels[rows], [*map(str, rows.tolist())])
    return Source(
        name="embedded Fashion-MNIST",
        parts=parts,
        class_names=tuple(_FASHION.split(", ")),
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


def open_data(options: Options) -> Source:
    """Open the data that `--data` names."""
    try:
        if options.data == EMBEDDED:
            for name in ("val", "image_size"):
                if getattr(options, name) is not None:
                    raise UsageError(
                        f"it is used as it is: {option_of(name)} is for pictures in "
                        "files"
                    )
            source = load()
            source.options = options
            return source
        source = _opened(options)
    except (UsageError, OSError) as error:
        raise UsageError(f"--data {options.data}: {words_of(error)}") from error
    size = options.image_size or _default_size(options.model, source)
    source.image_shape = (3, size, size)
    # The error of a missing library or a wrong policy comes now, not from a worker.
    _transform(True, size, options.augment)
    return source


def of_files(names: Sequence[str], size: int, workers: int | None) -> Source:
    """Return files as a source of pictures without labels, to test on."""
    rows = torch.arange(len(names))
    return Source(
        name="pictures",
        parts={TEST: DataPart(list(names), rows, torch.zeros_like(rows), names)},
        class_names=("",),
        image_shape=(3, size, size),
        options=Options(augment="none", workers=workers),
    )


def _opened(options: Options) -> Source:
    """Open a folder, or a library's set, and choose what is tested when."""
    path = Path(options.data)
    prefix = options.data.partition("/")[0].lower()
    if path.is_dir():
        source = _of_folders(path)
    elif prefix in _STREAMS:
        raise UsageError(
            f"{prefix}/ is a stream, whose pictures have no names and no numbers, so "
            "that a run could not be resumed; unpack it into folders of classes, or "
            "use hfds/NAME"
        )
    elif prefix == "hfds":
        source = _of_hugging_face(options)
    elif prefix == "torch":
        source = _of_torchvision(options)
    else:
        # A misspelt path looks like the name of a library's set.
        near = suggestion(path.name, [entry.name for entry in path.parent.glob("*")])
        remedy = f"known by name are {EMBEDDED}, torch/NAME and hfds/NAME; {_LAYOUT}"
        if options.resume is not None:
            remedy = "--data FOLDER names where it is now"
        kind = "it is no folder" if path.exists() else "there is no such folder"
        raise UsageError(f"{kind}{near}; {remedy}")
    source.name = options.data
    source.options = options
    _choose_parts(source, options.val)
    return source


def _choose_parts(source: Source, val: float | None) -> None:
    """Hold out the part `val` of the training pictures if there are none that choose
    the best epoch.
    """
    parts = source.parts
    if VAL in parts and val is not None:
        raise UsageError("it has images to test on; leave out --val")
    if val is not None:
        is_held_out = hold_out(parts[TRAIN], val)
        parts[VAL] = parts[TRAIN].selected(is_held_out)
        parts[TRAIN] = parts[TRAIN].selected(~is_held_out)
    elif VAL not in parts:
        purpose = "test on"
        if TEST in parts:
            purpose = "choose the best epoch on (test is used once, at the end)"
        raise UsageError(
            f"there are no images to {purpose}: --val 0.1 holds out a tenth of those "
            "to train on; or make folders train/ and val/ with the classes in each"
        )
    source.parts = {name: parts[name] for name in (TRAIN, VAL, TEST) if name in parts}
    counts = source.class_counts
    empty = _of_zero(source.class_names, counts.pop(TRAIN))
    if empty:
        raise UsageError(f"there are no images to train on of {first_names(empty)}")
    for numbers in counts.values():
        untested = _of_zero(source.class_names, numbers)
        if untested:
            source.notes.append(
                "warning: not tested, as there is no picture for it: "
                f"{first_names(untested)}"
            )


def _of_zero(class_names: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Return the classes without pictures."""
    return [name for name, count in zip(class_names, counts, strict=True) if not count]


def hold_out(part: DataPart, val: float) -> Tensor:
    """Return which pictures are to test on: those for which a hash of the name is below
    `val`, the same ones in every run. A new or renamed picture moves no other.

    One picture of each class is left to train on.
    """
    # In double precision: a rounded hash could be on the other side of `val`.
    places = torch.tensor([_place_of(name) for name in part.names], dtype=torch.float64)
    is_held_out = places < val
    for label in part.labels.unique():
        rows = (part.labels == label).nonzero().flatten()
        if bool(is_held_out[rows].all()):
            # The one of the largest hash: new pictures seldom change which it is.
            is_held_out[rows[places[rows].argmax()]] = False
    if not is_held_out.any():
        raise UsageError(f"it has too few pictures ({len(places)}) for --val {val}")
    return is_held_out


def _place_of(name: str) -> float:
    """Return a number from 0 to 1 that is a hash of a name.

    >>> f"{_place_of('cat/1.jpg'):.4f}"
    '0.7845'
    """
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def visible_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    entries = [entry for entry in sorted(path.iterdir()) if not is_hidden(entry.name)]
    return [entry for entry in entries if entry.is_dir()]


def is_hidden(name: str) -> bool:
    """Whether a file or a folder is hidden, by its name."""
    return name.startswith(".") or name == _MAC_COPY


def _has_run(folder: Path) -> bool:
    """Whether a folder is that of a run, or contains one."""
    for _, _, names in os.walk(folder):
        if METRICS_FILE in names or LOCK_FILE in names:
            return True
    return False


def _of_folders(path: Path) -> Source:
    """List the pictures in train/CLASS, val/CLASS and test/CLASS, or in CLASS."""
    folders = visible_folders(path)
    roots = {}
    for part, names in _FOLDERS.items():
        # A folder without folders is a class: trains beside buses.
        of_part = [
            folder
            for folder in folders
            if folder.name in names and visible_folders(folder)
        ]
        if len(of_part) > 1:
            names_found = " and ".join(f"{folder.name}/" for folder in of_part)
            raise UsageError(f"{names_found} are the same part; {_LAYOUT}")
        if of_part:
            roots[part] = of_part[0]
    # Without train/ all folders are classes, also one that is called test.
    if TRAIN not in roots:
        roots = {TRAIN: path}
        folders = []
    source = Source(name=str(path), parts={}, class_names=())
    others = [folder.name for folder in folders if folder not in roots.values()]
    for name in others:
        if any(name in names for names in _FOLDERS.values()):
            raise UsageError(
                f"{path / name} has no folders of classes: move it elsewhere (predict "
                f"takes such pictures), or pass --data {roots[TRAIN]} --val 0.1; "
                f"{_LAYOUT}"
            )
    if others:
        source.notes.append(f"not read: other folders, {first_names(others)}")
    for part, root in roots.items():
        _list_folder(source, part, root)
    return source


def _list_folder(source: Source, part: str, root: Path) -> None:
    """Add the part whose classes are the folders of `root`."""
    classes = []
    for folder in visible_folders(root):
        if _has_run(folder):
            source.notes.append(f"left aside: {folder}/, which has runs of this tool")
        else:
            classes.append(folder.name)
    if len(classes) < 2:
        tables = [table.name for table in root.glob("*.csv")]
        hint = f" (a table such as {tables[0]} is not read)" if tables else ""
        raise UsageError(
            f"{root} has {len(classes)} folders of classes, and two are needed{hint}; "
            f"{_LAYOUT}"
        )
    try:
        listed = library("timm.data").create_dataset(
            "",  # a folder
            root=str(root),
            search_split=False,  # timm would read train/ below a part
            input_key=";".join(_ENDINGS),
        )
        files = [name for name, _ in listed.reader.samples]
    except RuntimeError:  # timm finds none
        files = []
    # By the name in one normal form: a Mac writes another one than Linux.
    pictures = {}
    for file in files:
        place = PurePath(os.path.relpath(file, root)).parts
        name = unicodedata.normalize("NFC", "/".join(place))
        if place[0] not in classes or any(map(is_hidden, place)):
            if len(place) == 1 and not is_hidden(name):
                raise UsageError(f"{file} is beside the folders of classes; {_LAYOUT}")
            continue
        if len(place) > 2:
            raise UsageError(
                f"{root / place[0]} has folders, such as {place[1]}/, where a class "
                f"has pictures; {_LAYOUT}"
            )
        pictures[name] = file
    names = sorted(pictures)
    of_classes = [name.partition("/")[0] for name in names]
    unread = _unread_in_words(root, classes, set(files))
    lacking = [
        name
        for name in classes
        if unicodedata.normalize("NFC", name) not in set(of_classes)
    ]
    if lacking:
        raise UsageError(
            f"{root} lacks pictures of {first_names(lacking)}: it is searched for "
            f"files that end in {', '.join(_ENDINGS)}; convert other files, and remove "
            f"folders without any (not read: {unread or 'nothing'})"
        )
    if part == TRAIN:
        # As timm numbers them.
        natural = library("timm.utils.misc").natural_key
        source.class_names = tuple(sorted(set(of_classes), key=natural))
    strange = sorted(set(of_classes) - set(source.class_names))
    if strange:
        raise UsageError(
            f"{root} has classes that there are no images to train on for: "
            f"{first_names(strange)}"
        )
    if unread:
        source.notes.append(f"not read in {root.name}/: {unread}")
    numbers = {name: number for number, name in enumerate(source.class_names)}
    labels = torch.tensor([numbers[name] for name in of_classes])
    rows = torch.arange(len(names))
    source.parts[part] = DataPart(
        [pictures[name] for name in names], rows, labels, names
    )


def _unread_in_words(root: Path, classes: Sequence[str], listed: set[str]) -> str:
    """Return how many files in the folders of classes are not read, by ending."""
    counts = Counter[str]()
    for name in classes:
        for file in os.scandir(root / name):
            if not is_hidden(file.name) and file.path not in listed and file.is_file():
                counts[os.path.splitext(file.name)[1] or "without an ending"] += 1
    texts = [f"{number:,} files {ending}" for ending, number in counts.items()]
    return first_names(texts)


def _of_hugging_face(options: Options) -> Source:
    """Open a data set of Hugging Face's hub, or a folder that its library reads."""
    if not options.download:
        # The library reads this variable when it is imported.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    installed("datasets", "datasets")
    create_dataset = library("timm.data").create_dataset
    source = Source(name=options.data, parts={}, class_names=())
    for part, split in _SPLITS.items():
        try:
            dataset = create_dataset(
                options.data,
                split=split,
                input_key=options.input_key,
                target_key=options.target_key,
            )
            _ = dataset.reader[0]  # an absent column is an error now
        except Exception as error:  # of timm, datasets, and the hub
            words = words_of(error)
            if part != TRAIN and "nknown split" in words:
                continue
            raise UsageError(
                f"{words:.300} (--download fetches it; --input-key and --target-key "
                "name its columns)"
            ) from error
        reader = dataset.reader
        class_names = tuple(reader.class_to_idx)
        labels = list(reader.iter_targets())
        if not class_names or not all(isinstance(label, int) for label in labels):
            raise UsageError(
                f"its column {options.target_key} is not one class of several by name "
                "(ClassLabel); --target-key names another"
            )
        if part == TRAIN:
            source.class_names = class_names
        if class_names != source.class_names:
            raise UsageError(f"the classes of its split {split} are others")
        # The hub's sets number an unknown label as -1.
        known = [row for row, label in enumerate(labels) if label >= 0]
        if not known:
            source.notes.append(f"not read: {split}, which has no labels")
            continue
        source.parts[part] = _numbered(dataset, [labels[row] for row in known], known)
    return source


def _of_torchvision(options: Options) -> Source:
    """Open a data set of torchvision by timm's name."""
    create_dataset = library("timm.data").create_dataset
    source = Source(name=options.data, parts={}, class_names=())
    try:
        for part, split in ((TRAIN, "train"), (VAL, "validation")):
            pairs = create_dataset(
                options.data, _TORCHVISION_ROOT, split, download=options.download
            )
            source.class_names = tuple(map(str, pairs.classes))
            labels = torch.as_tensor(pairs.targets).tolist()
            source.parts[part] = _numbered(pairs, labels, range(len(labels)))
    except Exception as error:
        raise UsageError(
            f"{words_of(error):.300} (looked in {_TORCHVISION_ROOT}/; --download "
            "fetches it)"
        ) from error
    return source


def _numbered(pictures: Any, labels: Sequence[int], rows: Sequence[int]) -> DataPart:
    """Return the part of a library's set, whose pictures have numbers for names."""
    names = [*map(str, rows)]
    return DataPart(pictures, torch.tensor(rows), torch.tensor(labels), names)


def _open(part: DataPart, row: int) -> Any:
    """Open a picture of a part."""
    place = int(part.rows[row])
    pictures = part.pictures
    if isinstance(pictures, list):
        return open_picture(pictures[place])
    # timm's readers return an open file with its label, torchvision's sets a picture.
    picture, _ = (
        pictures.reader[place] if hasattr(pictures, "reader") else pictures[place]
    )
    return open_picture(picture)


def _default_size(model: str, source: Source) -> int:
    """Return the side of timm's configuration for timm's models, else the median of the
    shorter sides of a sample, from 32 to 224.
    """
    place, _, name = model.partition(":")
    if place == "timm":
        configuration = library("timm.models").get_pretrained_cfg(name)
        shape = getattr(configuration, "input_size", None)
        return int(shape[-1]) if shape else _LARGEST_SIDE
    sides = list[int]()
    part = source.parts[TRAIN]
    number = len(part.rows)
    # Over all classes, as pictures are sorted by class.
    for row in range(0, number, -(-number // _SAMPLE)):  # rounded up
        # A picture that cannot be read is told later.
        with contextlib.suppress(Exception):
            sides.append(min(_open(part, row).size))
    median = round(statistics.median(sides or [_LARGEST_SIDE]))
    return max(_SMALLEST_SIDE, min(median, _LARGEST_SIDE))


# Kept in each worker, because every piece of 64 images asks for it.
@functools.cache
def _transform(is_varied: bool, size: int, augment: str) -> Callable[[Any], Tensor]:
    """Build what turns a picture into a tensor of uint8. Pictures to train on are
    varied at random, by timm.
    """
    if augment == "none" or not is_varied:
        return functools.partial(as_pixels, size=size)
    policy = None if augment == "crop" else augment
    # Not normalised: the model does it on the device, to which bytes are copied.
    try:
        varied: Any = library("timm.data").create_transform(
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
    return varied  # type: ignore[no-any-return]


def _at_least_one_bit(level: Callable[..., tuple[int]], *arguments: Any) -> tuple[int]:
    """Return the level of timm's Posterize, at least one bit: Pillow 13 refuses zero
    bits.
    """
    (bits,) = level(*arguments)
    return (max(1, bits),)
