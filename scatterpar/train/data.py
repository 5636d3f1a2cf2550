"""Images: the included ones, and pictures in files, which torchvision finds and timm
varies.

Worker processes read pieces of a batch, which torch's DataLoader yields in order, and a
thread joins them. So memory has the engine's batch, the next one, and a few pieces, for
any number of workers. The random variation of a picture depends only on the seed, the
epoch and its row: any worker reads the same picture, also after a resume within an
epoch.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import gzip
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from scatterpar.train.options import EMBEDDED, Options, UsageError, words_of

TRAIN, TEST = "train", "test"
PIECE = 64  # images that a worker reads at once; mixup mixes images of one piece
_PIECES_AHEAD, _MOST_WORKERS = 2, 16  # per worker; by default
Shape = tuple[int, int, int]  # channels, height, width
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_MEAN = (123.675, 116.28, 103.53)  # ImageNet's, for pixels from 0 to 255
_STD = (58.395, 57.12, 57.375)
_OF_FILES = "val", "image_size", "augment", "erase", "mixup", "cutmix"  # options
_HAS_TESTS = "it has images to test on; leave out --val"
_NO_SPLIT = (
    "class folders, no split: --val 0.1 tests on a tenth of each class; or "
    "make train/ and "
)
_NO_SPLIT += "test/ (or val/) with the classes in each"
_INSTALL, _WHEELS = (
    "pip install -c constraints.txt",
    "https://download.pytorch.org/whl/cpu",
)


class Request(NamedTuple):
    """Rows of a part, `TRAIN` or `TEST`, to be read as one batch, varied as in that
    epoch.
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


class Files:
    """Names of files, and their labels: two tensors, which worker processes share."""

    def __init__(self, found: Sequence[tuple[str, int]]) -> None:
        encoded = [os.fsencode(name) for name, _ in found]
        width = max(map(len, encoded))
        padded = bytearray(b"".join(name.ljust(width, b"\0") for name in encoded))
        self._names = torch.frombuffer(padded, dtype=torch.uint8).view(
            len(encoded), width
        )
        self.labels = torch.tensor([label for _, label in found], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[str, int]:
        return os.fsdecode(bytes(self._names[row].tolist()).rstrip(b"\0")), int(
            self.labels[row]
        )


@dataclass
class Source:
    """Images to train and to test on, with the mean and deviation of their pixels per
    channel.

    Each part is images and labels in memory (a `TensorDataset`), or pictures: `Files`,
    or a library's pairs of a picture and a label.
    """

    name: str
    train: Any
    test: Any
    class_names: tuple[str, ...]
    image_shape: Shape
    mean: Tensor
    std: Tensor
    options: Options = field(default_factory=Options)

    @property
    def in_memory(self) -> bool:
        """Whether images are tensors, which need neither workers nor transforms."""
        return isinstance(self.train, TensorDataset)

    def __getitem__(self, request: Request) -> Images:
        """Read the images of a request, or of a piece of one."""
        part, rows, epoch = request
        pairs = self.train if part == TRAIN else self.test
        if self.in_memory:
            return Images(*pairs[rows])
        seed, size, classes = (
            self.options.seed,
            self.image_shape[1],
            len(self.class_names),
        )
        transform, mix = _transforms(size, self.options, classes)[part]
        images = torch.empty(len(rows), *self.image_shape, dtype=torch.uint8)
        found, broken = list[int](), list[tuple[str, str]]()
        for row in torch.as_tensor(rows).tolist():
            try:
                picture, label = _opened(pairs, row)
                picture = picture.convert("RGB")
            except Exception as error:  # Pillow's decoders raise many kinds
                of_files = isinstance(pairs, Files)
                name = (
                    pairs[row][0] if of_files else f"{self.name} ({part}), image {row}"
                )
                broken.append((name, words_of(error)))
            else:
                seed_host("image", seed, epoch, row)
                images[len(found)] = transform(picture)
                found.append(label)
        images, labels = images[: len(found)], torch.tensor(found, dtype=torch.int64)
        if mix is not None and found:
            seed_host("piece", seed, epoch, int(rows[0]))
            mixed, labels = mix(images.float(), labels)
            images = mixed.round_().to(torch.uint8)
        return Images(images, labels, broken)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.image_shape))
        return (
            f"{self.name}: {len(self.train):,} images to train on, {len(self.test):,} "
            "to test, "
            f"{len(self.class_names)} classes, "
            f"{'' if self.in_memory else 'brought to '}{shape}"
        )


def _opened(pairs: Any, row: int) -> tuple[Any, int]:
    """Open a picture, of which only the header is read yet. Returns it,
    and its label.
    """
    from PIL import Image

    picture, label = pairs[row]
    return picture if isinstance(picture, Image.Image) else Image.open(picture), int(
        label
    )


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
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return seed


_Batches = Generator[tuple[Request, Images], None, None]


class FeedError(UsageError):
    """A request cannot be read: an image is broken, or a worker process has ended."""


class Feed(contextlib.AbstractContextManager["Feed"]):
    """Reads the requested batches, in order, with as many workers as the source's
    options say.

    Up to `--skip-broken` unreadable images are left out, with a line to `file` for
    each. `broken` counts how often each was left out. `waited` are the seconds that the
    last `take` took.
    """

    def __init__(
        self, source: Source, requests: Iterable[Request] = (), file: Any = None
    ) -> None:
        self.source, self.waited, self.broken = source, 0.0, Counter[str]()
        self._file, self._workers = (
            file,
            0 if source.in_memory else source.options.workers,
        )
        if self._workers is None:
            affinity = getattr(
                os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1)
            )
            self._workers = min(_MOST_WORKERS, len(affinity(0)))
        self._batches = self._read(iter(()))
        self.request(requests)

    def request(self, requests: Iterable[Request]) -> None:
        """Read these requests from now on, and drop batches that were prefetched."""
        self._batches.close()
        self._closed, batches = False, self._read(iter(requests))
        self._batches = self._ahead(batches) if self._workers else batches

    def take(self) -> tuple[Request, Images]:
        """Return the next request, and its images, without unreadable ones."""
        start = time.perf_counter()
        try:
            request, images = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # a worker process has ended
            words = f"images cannot be read: {words_of(error):.300}"
            raise FeedError(f"{words} (fewer --workers need less memory)") from error
        self.waited = time.perf_counter() - start
        for name, reason in images.broken:
            words = f"{name} cannot be read as an image: {reason}"
            if name not in self.broken:
                if len(self.broken) >= self.source.options.skip_broken:
                    more = f"--skip-broken {len(self.broken) + 1} or more leaves it out"
                    raise FeedError(f"{words} ({more})")
                tqdm.write(f"left out: {words}", file=self._file)
            self.broken[name] += 1
        return request, images

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def _ahead(self, batches: _Batches) -> _Batches:
        """Read the next batch in a thread while this one is used."""
        # The thread starts the workers: in the main thread torch would install a signal
        # handler that raises an error anywhere when a worker ends by itself.
        with ThreadPoolExecutor(1, thread_name_prefix="next batch") as thread:
            following = thread.submit(next, batches, None)
            try:
                while (batch := following.result()) is not None:
                    following = thread.submit(next, batches, None)
                    yield batch
            finally:
                self._closed = True  # the thread stops within a batch
                # the workers end with torch's iterator
                thread.submit(batches.close).result()

    def _read(self, requests: Iterator[Request]) -> _Batches:
        """Copy the pieces of each batch out of shared memory, each as it arrives."""
        requests, to_cut = tee(requests)
        # A private generator, so that the DataLoader does not draw from the process's.
        options: dict[str, Any] = {
            "num_workers": self._workers,
            "generator": torch.Generator(),
        }
        # by a fork of a server without threads if possible, otherwise spawned
        if self._workers:
            has_server = "forkserver" in multiprocessing.get_all_start_methods()
            context: Any = multiprocessing.get_context(
                "forkserver" if has_server else "spawn"
            )
            if has_server:
                context.set_forkserver_preload(["scatterpar.train.preloaded"])
            options |= {
                "multiprocessing_context": context,
                "prefetch_factor": _PIECES_AHEAD,
            }
            options["worker_init_fn"] = _end_with_main_process
        # As lists: tensors would go to a worker through shared memory, each by a
        # thread.
        cut = (
            r._replace(rows=rows.tolist())
            for r in to_cut
            for rows in r.rows.split(PIECE)
        )
        loader = DataLoader[Any](self.source, batch_size=None, sampler=cut, **options)  # type: ignore[arg-type]
        # `chain` starts the workers with the first piece: a signal may end their server
        # then.
        pieces, pin = chain.from_iterable([loader]), torch.accelerator.is_available()
        for request in requests:
            shape = len(request.rows), *self.source.image_shape
            images = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
            labels, broken, filled = [], list[tuple[str, str]](), 0
            for piece in islice(pieces, -(-len(request.rows) // PIECE)):
                if self._closed:
                    return
                start, filled = filled, filled + len(piece.images)
                images[start:filled] = piece.images
                labels.append(piece.labels.clone())
                broken += piece.broken
            yield request, Images(images[:filled], torch.cat(labels), broken)


def _end_with_main_process(_: int) -> None:
    """Make a worker end with the main process, and not before, by a signal to all
    processes.
    """
    # Torch's workers watch their parent, but that is the fork server, which waits for
    # them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main: Any = multiprocessing.parent_process()
    # not joined at exit
    _thread.start_new_thread(lambda: (main.join(), os._exit(1)), ())


def load() -> Source:
    """Load the images that are included; a part of them is for testing."""
    whole, names = (
        read_split(Path(__file__).parent / "embedded", "t10k"),
        _FASHION.split(","),
    )
    train, test = (
        TensorDataset(*whole[rows]) for rows in (slice(8192), slice(8192, None))
    )
    std, mean = torch.std_mean(train.tensors[0].float(), (0, 2, 3), correction=0)
    return Source(
        "embedded Fashion-MNIST", train, test, tuple(names), (1, 28, 28), mean, std
    )


def read_split(folder: Path, part: str) -> TensorDataset:
    """Read 28 x 28 images and labels from MNIST's IDX files: a header, then single
    bytes.
    """

    def content(name: str, header: int) -> Tensor:
        file = gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(file[header:]), dtype=torch.uint8)

    images, labels = content("images-idx3", 16), content("labels-idx1", 8)
    return TensorDataset(images.view(-1, 1, 28, 28), labels.long())


def library(module: str) -> Any:
    """Import a module of torchvision or timm, even if torchvision was built for another
    torch.

    Then its operators for object detection are missing; the import succeeds if their
    names exist.
    """
    try:
        importlib.import_module("torchvision.ops")
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        if "torchvision::nms does not exist" not in str(error):
            wheels = (
                f"--extra-index-url {_WHEELS} " if torch.version.cuda is None else ""
            )
            line = f"where you cloned scatterpar run: {_INSTALL} {wheels}-e '.[images]'"
            words = f"this needs torchvision, built for this torch, and timm; {line}"
            raise UsageError(f"{words} ({words_of(error)})") from error
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "torchvision"
    ]:
        del sys.modules[name]
    return library(module)


@functools.cache
def _transforms(
    size: int, options: Options, classes: int
) -> dict[str, tuple[Any, Any]]:
    """Return the transforms of a picture and of a piece, by part. Pictures become
    uint8.
    """
    create, v2 = (
        library("timm.data").create_transform,
        library("torchvision.transforms.v2"),
    )
    make = functools.partial(create, size, interpolation="bilinear", normalize=False)
    # small ones have no edges to cut
    test = varied = make(crop_pct=1.0 if size < 128 else 7 / 8)
    policy = options.augment if options.augment != "crop" else None
    if options.augment != "none":
        try:
            varied = make(is_training=True, color_jitter=None, auto_augment=policy)
        except (AssertionError, ValueError, KeyError) as error:
            words = (
                f"--augment {policy} is neither none, nor crop, nor a policy of timm's"
            )
            raise UsageError(
                f"{words}, such as rand-m9-mstd0.5 ({words_of(error)})"
            ) from error
        for op in (op for step in varied.transforms for op in getattr(step, "ops", ())):
            if "Posterize" in op.name:  # Pillow 13 refuses zero bits
                op.level_fn = lambda *x, level=op.level_fn: (max(1, level(*x)[0]),)
    if options.erase:
        # zero, standardised
        erasing = v2.RandomErasing(options.erase, value=[*map(round, _MEAN)])
        varied = v2.Compose([varied, erasing])
    kinds = (v2.MixUp, options.mixup), (v2.CutMix, options.cutmix)
    mixing = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]
    return {
        TRAIN: (varied, v2.RandomChoice(mixing) if mixing else None),
        TEST: (test, None),
    }


def open_data(options: Options) -> Source:
    """Open the data that `--data` names."""
    try:
        if options.data != EMBEDDED:
            folder = Path(options.data).expanduser()
            is_folder = folder.is_dir()
            found = (
                _of_folder(folder, options.val) if is_folder else _of_library(options)
            )
            return make_pictures(options, *found)
        given = [
            n
            for n in _OF_FILES
            if getattr(options, n) not in (None, 0.0, "crop", "none")
        ]
        if given:
            raise UsageError(
                f"it is used as it is: --{given[0]} is for pictures in files"
            )
        return load()
    except (UsageError, OSError) as error:
        raise UsageError(f"--data {options.data}: {words_of(error)}") from error


def make_pictures(
    options: Options, train: Any, test: Any, classes: Sequence[str]
) -> Source:
    """Make a data set of pictures; by default their size is the first one's, at most
    224.
    """
    size = options.image_size or 224
    # the feed reports a picture that cannot be read
    with contextlib.suppress(Exception):
        size = options.image_size or min(size, *_opened(train, 0)[0].size)
    _transforms(size, options, len(classes))  # raises now if a library is missing
    shape, mean, std = (3, size, size), torch.tensor(_MEAN), torch.tensor(_STD)
    return Source(options.data, train, test, tuple(classes), shape, mean, std, options)


def _of_folder(path: Path, val: float | None) -> tuple[Files, Files, list[str]]:
    train = path / TRAIN if (path / TRAIN).is_dir() else path
    tests = [
        path / part
        for part in (TEST, "val")
        if train != path and (path / part).is_dir()
    ]
    names = [
        e.name
        for e in sorted(train.iterdir())
        if e.is_dir() and not e.name.startswith(".")
    ]
    if bool(tests) == (val is not None):
        raise UsageError(_HAS_TESTS if tests else _NO_SPLIT)
    if len(names) < 2:
        raise UsageError(
            f"{train} needs a folder for each class, two at least; it has {names}"
        )
    files = find_files(train, names)
    if val is None:
        return files, find_files(tests[0], names), names
    # Every part of each class, whose rows are shuffled, in the same way in every run.
    rows = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    rows = rows[files.labels[rows].argsort(stable=True)]
    tenths = (torch.arange(len(files) + 1, dtype=torch.float64) * val + 1e-9).long()
    is_test = tenths.diff() > 0
    if not is_test.any():
        raise UsageError(f"it has too few pictures ({len(files)}) for --val {val}")
    parts = (rows[chosen].sort().values.tolist() for chosen in (~is_test, is_test))
    held_in, held_out = (Files([files[row] for row in part]) for part in parts)
    return held_in, held_out, names


def find_files(folder: Path, classes: Sequence[str]) -> Files:
    """Find the pictures in the folders of classes, at any depth."""
    finder = library("torchvision.datasets.folder")
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        return Files(finder.make_dataset(str(folder), numbers, finder.IMG_EXTENSIONS))
    except FileNotFoundError as error:
        raise UsageError(f"{folder} lacks pictures: {words_of(error)}") from error


def _of_library(options: Options) -> tuple[Any, Any, list[str]]:
    if not options.data.startswith(("torch/", "hfds/")):
        raise UsageError(
            "there is no folder with train/ and test/ (or val/), nor one of classes "
            "for --val; "
            f"known by name are {EMBEDDED}, torch/NAME and hfds/NAME"
        )
    if options.val is not None:
        raise UsageError(_HAS_TESTS)
    if not options.download:
        # read when the library is imported
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
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
