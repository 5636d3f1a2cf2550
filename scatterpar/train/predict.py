"""`python -m scatterpar predict`: write classes and scores of pictures, on all devices."""

from __future__ import annotations

import csv
import functools
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
from scatterpar.train.data import TEST, Files, Request, find_files, make_pictures
from scatterpar.train.feed import Feed
from scatterpar.train.models import BUILT_IN, OnPixels, build_model
from scatterpar.train.options import UsageError, words_of
from scatterpar.train.records import BEST_FILE, load, written
from scatterpar.train.training import choose_devices, scored

_KNOWN = (BUILT_IN, "torchvision.models", "timm")  # their models need no --model
_BATCH = 1024  # pictures


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
    # processes that read pictures; 0: none (default: one for each core, at most 16)
    workers: opt.Number = None
    # allow the checkpoint to call this package.module:callable, if it was trained so
    model: opt.Name = None
    skip_broken: int = 0  # leave out so many pictures that cannot be read, rather than stop


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code: 0; 2: wrong argument or picture; 130: interrupted."""
    read = functools.partial(opt.read, PredictOptions, arguments, "predict")
    return opt.exit_code_of("predict", lambda: predict(read()))


def predict(options: PredictOptions) -> int:
    """Write the classes of all pictures."""
    model, about = _load_model(options)
    is_one = options.pictures.is_file()
    start = options.pictures.parent if is_one else options.pictures
    files = Files([(str(options.pictures), 0)]) if is_one else find_files(start, [""], True)
    classes, size = tuple(about["class_names"]), about["image_shape"][1]
    data = make_pictures(opt.Options(image_size=size, augment="none"), files, files, classes)
    is_plain = not options.devices and not torch.accelerator.is_available()
    devices = choose_devices("cpu" if is_plain else options.devices)
    coming = (Request(TEST, rows) for rows in torch.arange(len(files)).split(_BATCH))
    model, rows = model.to(devices[0]).eval(), options.micro_batch_size
    warn = functools.partial(print, file=sys.stderr)
    top, table = min(options.top, len(classes)), io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    suffixes = ["", *(f"_{n}" for n in range(2, top + 1))]
    writer.writerow(["file", *(f"{head}{end}" for end in suffixes for head in ("class", "score"))])
    with (
        ScatterOnceParallel(model, device_ids=devices, micro_batch_size=rows) as engine,
        Feed(data, coming, options.workers, options.skip_broken, warn) as feed,
    ):
        for batch, scores in scored(engine, feed, len(files), len(classes)):
            best = map(Tensor.tolist, scores.softmax(1).topk(top))
            for row, values, numbers in zip(batch.rows.tolist(), *best, strict=True):
                name = os.path.relpath(files[row][0], start)
                pairs = zip(numbers, values, strict=True)
                writer.writerow([name, *(x for i, v in pairs for x in (classes[i], f"{v:.6f}"))])
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
        raise UsageError(
            f"{path} is of --model {name}, which is code from elsewhere: give --model {name} if it "
            "may be called"
        )
    shape, classes = tuple(about["image_shape"]), len(about["class_names"])
    model = build_model(name, shape, classes, about["mean"], about["std"])
    start, average = "module.network.", state.get("average") or {}
    averaged = {n.removeprefix(start): x for n, x in average.items() if n.startswith(start)}
    try:
        model.network.load_state_dict(state["model"] | averaged)
    except RuntimeError as error:
        words = f"{path} does not fit --model {name}: {words_of(error):.200}"
        raise UsageError(words) from error
    return model, about
