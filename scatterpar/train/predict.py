"""`python -m scatterpar predict`: classes and scores of pictures, on all devices."""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

import torch
import tyro
from torch import Tensor, nn

from scatterpar import ScatterOnceParallel
from scatterpar.train.checkpoint import load, load_weights
from scatterpar.train.data import TEST, UsageError, words_of
from scatterpar.train.evaluation import scored
from scatterpar.train.feed import Feed, Request, default_workers
from scatterpar.train.machines import choose_devices
from scatterpar.train.models import BUILT_IN, OnPixels, build_model
from scatterpar.train.options import Folder, Name, Number, read
from scatterpar.train.pictures import PictureData, Reading, find_files

_KNOWN = ("torchvision.models", "timm")  # whose models a checkpoint may name by itself


@dataclass(frozen=True)
class Wanted:
    """Write the classes of all pictures in a folder, with their scores, as CSV: a line a file."""

    examples: ClassVar[str] = """examples:
  python -m scatterpar predict runs/photos/best.pt photos/new --out classes.csv --top 5"""

    # best.pt or checkpoint.pt of a training run
    checkpoint: tyro.conf.Positional[Path]
    # folder of pictures, with folders in it at will
    folder: tyro.conf.Positional[Path]
    # write there (default: standard output)
    out: Folder = None
    # classes of each picture
    top: int = 1
    # pictures at a time
    batch: int = 1024
    # pictures of a sub-step of each device
    micro_batch_size: int = 64
    # such as cuda:0,cuda:1 (default: every GPU, or the CPU)
    devices: Name = None
    # processes that read pictures; 0: none (default: one for each core, at most 16)
    workers: Number = None
    # allow the checkpoint to call this package.module:callable, if it was trained so
    model: Name = None
    # leave out so many pictures that cannot be read, rather than stop
    skip_broken: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run the tool; return the exit code: 0, 2 for a wrong argument or picture, 130 interrupted."""
    try:
        predict(read(Wanted, arguments, "predict"))
    except UsageError as error:
        print(f"scatterpar predict: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scatterpar predict: interrupted", file=sys.stderr)
        return 130
    return 0


def predict(wanted: Wanted) -> None:
    """Write the classes of all pictures.

    Raises:
        UsageError: the checkpoint, the folder, or a picture in it is not what it should be.
    """
    if not wanted.folder.is_dir():
        raise UsageError(f"{wanted.folder} is no folder")
    files = find_files(wanted.folder, [""], allow_empty=True)
    model, about = _load_model(wanted)
    classes, (channels, size, _) = tuple(about["class_names"]), about["image_shape"]
    data = PictureData("", files, files, classes, Reading(int(size), augment="none"))
    default = None if torch.accelerator.is_available() else "cpu"
    devices = choose_devices(wanted.devices or default)
    coming = (Request(TEST, rows) for rows in torch.arange(len(files)).split(wanted.batch))
    workers = default_workers() if wanted.workers is None else wanted.workers
    reads = (OneChannel(model) if channels == 1 else model).to(devices[0]).eval()
    size = wanted.micro_batch_size
    engine = ScatterOnceParallel(reads, device_ids=devices, micro_batch_size=size)
    with (
        _opened(wanted.out) as file,
        engine,
        Feed(data, coming, workers, wanted.skip_broken, _warn) as feed,
    ):
        top = min(wanted.top, len(classes))
        writer = csv.writer(file, lineterminator="\n")
        numbers = ["", *(f"_{n}" for n in range(2, top + 1))]
        writer.writerow(["file", *(f"{head}{n}" for n in numbers for head in ("class", "score"))])
        for found, scores in scored(engine, feed, len(files)):
            best = scores.softmax(1).topk(top)
            for row, values, places in zip(
                found.rows.tolist(), *map(Tensor.tolist, best), strict=True
            ):
                name = os.path.relpath(files.name(row), wanted.folder)
                pairs = zip(places, values, strict=True)
                writer.writerow([name, *(x for i, v in pairs for x in (classes[i], f"{v:.6f}"))])


def _load_model(wanted: Wanted) -> tuple[OnPixels, dict[str, Any]]:
    """Build the model that a checkpoint is of, with its weights."""
    state = load(wanted.checkpoint)
    about = state["about"]
    name = str(about["model"])
    if name not in (BUILT_IN, wanted.model) and name.partition(":")[0] not in _KNOWN:
        raise UsageError(
            f"{wanted.checkpoint} is of --model {name}, which is code from elsewhere: give "
            f"--model {name} if it may be called"
        )
    shape, classes = tuple(about["image_shape"]), len(about["class_names"])
    model = build_model(name, shape, classes, about["mean"], about["std"])
    try:
        load_weights(model.network, state)
    except RuntimeError as error:
        words = f"{wanted.checkpoint} does not fit --model {name}: {words_of(error):.200}"
        raise UsageError(words) from error
    return model, about


class OneChannel(nn.Module):
    """A model of grey images that is given coloured ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        """Compute the model's output for the mean of the channels, rounded."""
        return self.model(images.float().mean(1, keepdim=True).round_())


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
