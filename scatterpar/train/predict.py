"""`python -m scatterpar predict`: write classes and scores of pictures, on all
devices.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro

from scatterpar import ScatterOnceParallel
from scatterpar.train import options as opt
from scatterpar.train.data import BatchRequest, Source, make_pictures
from scatterpar.train.feed import Feed
from scatterpar.train.folders import TEST, Files, Unused, endings, files_below
from scatterpar.train.models import load_model
from scatterpar.train.options import UsageError, exit_code_of, printable, read
from scatterpar.train.records import written
from scatterpar.train.training import choose_devices, scored

_ROWS = 1024  # pictures of a batch
_Prediction = list[tuple[str, float]]  # classes with their scores, the highest first


@dataclass(frozen=True)
class PredictOptions:
    """Write the classes of pictures, with their scores, as CSV: one line per file."""

    examples: ClassVar[str] = """examples:
  python -m scatterpar predict runs/photos photos/new --out classes.csv --top 5

The columns are file, class, score (class_2, score_2, … with --top), and error: why a
file has no class. Hidden files have no line."""

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
    # allow the checkpoint to call this package.module:callable
    model: opt.Name = None
    # has no effect any more: a picture that cannot be read has a line with the reason
    skip_broken: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code: 0; 2: wrong argument, or no picture can be
    read.
    """
    return exit_code_of(
        "predict", lambda: predict(read(PredictOptions, arguments, "predict"))
    )


def predict(options: PredictOptions) -> int:
    """Write the classes of all pictures."""
    pictures = options.pictures
    if not pictures.exists():
        raise UsageError(f"{pictures} is not here; pass an image or a folder of images")
    model, about = load_model(options.run, options.model)
    class_names = about["class_names"]
    reasons = dict[str, str]()  # why a file has no class
    names = [str(pictures)]
    if pictures.is_dir():
        names = _find_pictures(pictures, reasons)
    # The label of a file is its row.
    files = Files([(name, row) for row, name in enumerate(names)])
    source = _source(options, files, class_names, about["image_shape"][1])
    devices = choose_devices(options.devices)
    predictions = dict[str, _Prediction]()
    with (
        ScatterOnceParallel(
            model.to(devices[0]).eval(),
            device_ids=devices,
            micro_batch_size=options.micro_batch_size,
        ) as engine,
        Feed(source, _requests(files)) as feed,
    ):
        top = min(options.top, len(class_names))
        for batch, scores in scored(engine, feed, len(files), len(class_names)):
            values, labels = scores.softmax(1).topk(top)
            for row, row_values, row_labels in zip(
                batch.labels.tolist(), values.tolist(), labels.tolist(), strict=True
            ):
                chosen = [class_names[label] for label in row_labels]
                predictions[names[row]] = list(zip(chosen, row_values, strict=True))
        reasons |= feed.reasons
    start = pictures if pictures.is_dir() else pictures.parent
    _write(options.out, _table(predictions, reasons, start, top))
    if not predictions:
        raise UsageError(f"no picture can be read: {next(iter(reasons.values()))}")
    if reasons:
        total = len(predictions) + len(reasons)
        print(
            f"{len(reasons):,} of {total:,} files have no class; the column error says "
            "why",
            file=sys.stderr,
        )
    return 0


def _find_pictures(folder: Path, reasons: dict[str, str]) -> list[str]:
    """Return the pictures in a folder. Adds the reason of each file that is none."""
    extensions = endings()
    names = []
    for name in files_below(folder, Unused()):
        if name.lower().endswith(extensions):
            names.append(name)
        else:
            reasons[name] = f"its name does not end in {', '.join(extensions)}"
    if not names:
        raise UsageError(
            f"{folder} lacks pictures: files that end in {', '.join(extensions)}"
        )
    return names


def _source(
    options: PredictOptions, files: Files, class_names: Sequence[str], size: int
) -> Source:
    """Return the pictures as a data set, of which only the test part is read."""
    settings = opt.Options(image_size=size, augment="none", workers=options.workers)
    return make_pictures(settings, files, files, class_names)


def _requests(files: Files) -> Iterator[BatchRequest]:
    for rows in torch.arange(len(files)).split(_ROWS):
        yield BatchRequest(TEST, rows)


def _table(
    predictions: dict[str, _Prediction],
    reasons: dict[str, str],
    start: Path,
    top: int,
) -> str:
    """Return the lines of all files as CSV, sorted by their names."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    header = ["file", "class", "score"]
    for number in range(2, top + 1):
        header += [f"class_{number}", f"score_{number}"]
    writer.writerow([*header, "error"])
    for name in sorted([*predictions, *reasons]):
        cells: list[Any] = [os.path.relpath(name, start)]
        if name in reasons:
            cells += [""] * 2 * top
        else:
            for class_name, score in predictions[name]:
                cells += [class_name, f"{score:.6f}"]
        writer.writerow([*cells, reasons.get(name, "")])
    return table.getvalue()


def _write(path: Path | None, text: str) -> None:
    if path is None:
        sys.stdout.write(printable(text))
    else:
        with written(path) as file:
            file.write(os.fsencode(text))
