"""`python -m scatterpar predict`: write classes and scores of pictures,
on all devices.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.train import options as opt
from scatterpar.train.data import TEST, Feed, Files, Request, find_files, make_pictures
from scatterpar.train.options import UsageError, exit_code_of, read, words_of
from scatterpar.train.records import BEST_FILE, load, written
from scatterpar.train.training import (
    BUILT_IN,
    OnPixels,
    build_model,
    choose_devices,
    scored,
)

_KNOWN = (BUILT_IN, "torchvision.models", "timm")  # their models need no --model


@dataclass(frozen=True)
class PredictOptions:
    """Write the classes of pictures, with their scores, as CSV: one line per file."""

    examples: ClassVar[str] = """examples:
  python -m scatterpar predict runs/photos photos/new --out classes.csv --top 5"""

    # folder of a training run, of which best.pt is taken, or one of its checkpoints
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    # a picture, or a folder of pictures, which is searched recursively
    pictures: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PICTURES")]
    out: opt.Folder = None  # write there (default: standard output)
    top: int = 1  # classes of each picture
    micro_batch_size: int = 64  # pictures of a sub-step of each device
    # such as cuda:0,cuda:1 or cuda:0 cuda:1 (default: every GPU, or the CPU)
    devices: opt.Devices = ()
    # reading processes (default: one per core, at most 16; 0: none)
    workers: opt.Number = None
    model: opt.Name = None  # allow the checkpoint to call this package.module:callable
    # leave out so many pictures that cannot be read, rather than stop
    skip_broken: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code: 0; 2: wrong argument or picture."""
    return exit_code_of(
        "predict", lambda: predict(read(PredictOptions, arguments, "predict"))
    )


def predict(options: PredictOptions) -> int:
    """Write the classes of all pictures."""
    if not options.pictures.exists():
        raise UsageError(
            f"{options.pictures} is not here; pass an image or a folder of images"
        )
    model, about = _load_model(options)
    classes, is_one = tuple(about["class_names"]), options.pictures.is_file()
    start = options.pictures.parent if is_one else options.pictures
    files = Files([(str(options.pictures), 0)]) if is_one else find_files(start, [""])
    files.labels = torch.arange(len(files))  # so each image brings its row
    reading: dict[str, Any] = {
        "workers": options.workers,
        "skip_broken": options.skip_broken,
    }
    settings = opt.Options(
        image_size=about["image_shape"][1], augment="none", **reading
    )
    data = make_pictures(settings, files, files, classes)
    coming = (Request(TEST, rows) for rows in files.labels.split(1024))
    devices, rows = choose_devices(options.devices), options.micro_batch_size
    model = model.to(devices[0]).eval()
    top, table = min(options.top, len(classes)), io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    suffixes = ["", *(f"_{n}" for n in range(2, top + 1))]
    writer.writerow(
        ["file", *(f"{head}{end}" for end in suffixes for head in ("class", "score"))]
    )
    with (
        ScatterOnceParallel(model, device_ids=devices, micro_batch_size=rows) as engine,
        Feed(data, coming, sys.stderr) as feed,
    ):
        for batch, scores in scored(engine, feed, len(files), len(classes)):
            best = map(Tensor.tolist, scores.softmax(1).topk(top))
            for row, values, numbers in zip(batch.labels.tolist(), *best, strict=True):
                name = os.path.relpath(files[row][0], start)
                pairs = zip(numbers, values, strict=True)
                writer.writerow(
                    [name, *(x for i, v in pairs for x in (classes[i], f"{v:.6f}"))]
                )
    if options.out is None:
        sys.stdout.write(table.getvalue())
    else:
        with written(options.out) as file:
            file.write(os.fsencode(table.getvalue()))
    return 0


def _load_model(options: PredictOptions) -> tuple[OnPixels, dict[str, Any]]:
    """Build the model of a checkpoint, with the weights that its run would test."""
    path = options.run / BEST_FILE if options.run.is_dir() else options.run
    state = load(path)
    about, name = state["about"], state["about"]["model"]
    if name != options.model and name.partition(":")[0] not in _KNOWN:
        words = f"which is code from elsewhere: give --model {name} if it may be called"
        raise UsageError(f"{path} is of --model {name}, {words}")
    shape, classes = tuple(about["image_shape"]), len(about["class_names"])
    model = build_model(name, shape, classes, about["mean"], about["std"])
    start, average = "module.network.", state.get("average") or {}
    averaged = {
        n.removeprefix(start): x for n, x in average.items() if n.startswith(start)
    }
    try:
        model.network.load_state_dict(state["model"] | averaged)
    except RuntimeError as error:
        raise UsageError(
            f"{path} does not fit {name}: {words_of(error):.200}"
        ) from error
    return model, about
