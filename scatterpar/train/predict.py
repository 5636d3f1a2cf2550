"""`python -m scatterpar predict`: classes and scores of pictures, on all devices."""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.train.arguments import Parser, count, whole
from scatterpar.train.checkpoint import load, load_weights
from scatterpar.train.device_choice import choose_devices
from scatterpar.train.errors import UsageError
from scatterpar.train.feed import Feed, Request, default_workers
from scatterpar.train.folder import Files, find_images
from scatterpar.train.model_choice import BUILT_IN, OnPixels, build_model
from scatterpar.train.pictures import PictureData
from scatterpar.train.source import TEST
from scatterpar.train.transforms import Augmentation

_PROGRAM = "scatterpar predict"
_KNOWN = ("torchvision.models",)  # whose callables a checkpoint may name by itself


@dataclass(frozen=True)
class Wanted:
    """The command line's options."""

    checkpoint: Path
    folder: Path
    out: Path | None
    top: int
    batch: int
    micro_batch_size: int
    devices: str | None
    workers: int
    model: str | None
    skip_broken: bool


def main(arguments: Sequence[str]) -> int:
    """Run the tool; return the exit code: 0, 2 for a wrong argument or picture, 130 interrupted."""
    try:
        predict(parse(arguments))
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> Wanted:
    """Turn the command line into options.

    Raises:
        UsageError: an argument is wrong.
        SystemExit: help was asked for.
    """
    parser = Parser(
        prog=f"python -m {_PROGRAM}",
        description="Write the classes of all pictures in a folder, with their scores, as CSV: a "
        "line for each file, in order.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or checkpoint.pt of a training run")
    add("folder", type=Path, help="folder of pictures, with folders in it at will")
    add("--out", type=Path, metavar="FILE", help="write there (default: standard output)")
    add("--top", type=count, default=1, metavar="N", help="classes of each picture (default 1)")
    add("--batch", type=count, default=1024, metavar="N", help="pictures at a time (default 1024)")
    add(
        "--micro-batch-size",
        type=count,
        default=64,
        metavar="N",
        help="pictures of a sub-step of each device (default 64)",
    )
    add("--devices", metavar="LIST", help="such as cuda:0,cuda:1 (default: every GPU, or the CPU)")
    add(
        "--workers",
        type=whole,
        default=default_workers(),
        metavar="N",
        help="processes that read pictures (default: one for each core, at most 16)",
    )
    add(
        "--model",
        metavar="NAME",
        help="allow the checkpoint to call this package.module:callable, if it was trained so",
    )
    add(
        "--skip-broken",
        action="store_true",
        help="leave out pictures that cannot be read, rather than stop",
    )
    return Wanted(**vars(parser.parse_args(arguments)))


def predict(wanted: Wanted) -> None:
    """Write the classes of all pictures.

    Raises:
        UsageError: the checkpoint, the folder, or a picture in it is not what it should be.
    """
    if not wanted.folder.is_dir():
        raise UsageError(f"{wanted.folder} is no folder")
    names = list(find_images(wanted.folder))
    if not names:
        raise UsageError(f"{wanted.folder} holds no pictures")
    model, about = _load_model(wanted)
    classes, size = tuple(about["class_names"]), int(about["image_shape"][1])
    files = Files(wanted.folder, names, [0] * len(names))
    data = PictureData("", files, files, classes, size, Augmentation("none"), seed=0)
    devices = choose_devices(wanted.devices, None if torch.accelerator.is_available() else 1)
    batches = [Request(TEST, rows) for rows in torch.arange(len(names)).split(wanted.batch)]
    pin = torch.accelerator.is_available()
    with (
        _opened(wanted.out) as file,
        ScatterOnceParallel(
            model.to(devices[0]).eval(),
            device_ids=devices,
            micro_batch_size=wanted.micro_batch_size,
        ) as engine,
        Feed(data, batches, wanted.workers, pin, wanted.skip_broken, _warn) as feed,
    ):
        top = min(wanted.top, len(classes))
        writer = csv.writer(file, lineterminator="\n")
        heads = ["class,score", *(f"class_{n},score_{n}" for n in range(2, top + 1))]
        writer.writerow(["file", *",".join(heads).split(",")])
        for batch in batches:
            found = feed.batch(TEST, batch.rows)
            if len(found.rows):
                images = found.images if about["image_shape"][0] == 3 else _grey(found.images)
                scores = engine(images).float().cpu()[:, : len(classes)].softmax(1)
                for row, cells in zip(
                    found.rows.tolist(), _cells(scores, classes, top), strict=True
                ):
                    writer.writerow([names[row], *cells])


def _cells(scores: Tensor, classes: Sequence[str], top: int) -> Iterator[list[str]]:
    """Yield the best classes of each row with their scores."""
    for values, places in zip(*(part.tolist() for part in scores.topk(top)), strict=True):
        pairs = (
            (classes[place], f"{value:.6f}") for place, value in zip(places, values, strict=True)
        )
        yield list(chain.from_iterable(pairs))


def _load_model(wanted: Wanted) -> tuple[OnPixels, dict[str, Any]]:
    """Build the model that a checkpoint is of, with its weights."""
    state = load(wanted.checkpoint)
    about = state["about"]
    name = str(about["model"])
    module = name.partition(":")[0]
    if name not in (*BUILT_IN, wanted.model) and module not in _KNOWN:
        raise UsageError(
            f"{wanted.checkpoint} is of --model {name}, which is code from elsewhere: give "
            f"--model {name} if it may be called"
        )
    shape, classes = tuple(about["image_shape"]), len(about["class_names"])
    model = build_model(name, shape, classes, about["mean"], about["std"])
    try:
        load_weights(model.network, state)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"{wanted.checkpoint} does not fit --model {name}: {words:.200}"
        ) from error
    return model, about


def _grey(images: Tensor) -> Tensor:
    return images.float().mean(1, keepdim=True).round_().to(torch.uint8)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    """Open a file that appears under its name once it is whole; or standard output."""
    if path is None:
        yield sys.stdout
        return
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("w", encoding="utf-8", newline="", errors="surrogateescape") as file:
            yield file
        os.replace(aside, path)
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror}") from error


def _warn(line: str) -> None:
    print(line, file=sys.stderr)
