"""`python -m scatterpar predict`: write classes and scores of pictures, on all
devices.
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.train import command_line
from scatterpar.train.command_line import UsageError, exit_code_of, printable, read
from scatterpar.train.data import BatchRequest, Images, make_source
from scatterpar.train.data_parts import TEST, Names, Pictures
from scatterpar.train.feed import Feed
from scatterpar.train.folders import files_below
from scatterpar.train.model_training import choose_devices, scored
from scatterpar.train.models import load_model
from scatterpar.train.progress import Progress
from scatterpar.train.records import stoppable, unwritten

_ROWS = 256  # pictures of a batch, whose lines are written together
STOPPING = "stopping after the present images"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the commands that use the model of a run on pictures."""

    # folder of a training run, of which best.pt is taken, or one of its checkpoints
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    micro_batch_size: int = 64  # pictures of a sub-step of each device
    # such as cuda:0,cuda:1 or cuda:0 cuda:1 (default: every GPU, or the CPU)
    devices: command_line.Devices = ()
    # reading processes (default: one per core, at most 16; 0: none)
    workers: command_line.Number = None
    # allow the checkpoint to call this package.module:callable
    model: command_line.Name = None


@dataclass(frozen=True, kw_only=True)
class PredictOptions(RunOptions):
    """Write the classes of pictures, with their scores, as CSV: one line per file."""

    examples: ClassVar[str] = """examples:
  python -m scatterpar predict runs/photos photos/new --out classes.csv --top 5

The columns are file, class, score (class_2, score_2, … with --top), and error: why a
file has no class. Hidden files have no line. Lines are written as they are computed."""

    # a picture, or a folder of pictures, which is searched recursively
    pictures: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PICTURES")]
    out: command_line.Folder = None  # write there (default: standard output)
    resume: bool = False  # go on after the last line of --out
    top: int = 1  # classes of each picture


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code: 0; 2: wrong argument, or no picture can be
    read; 130: interrupted.
    """
    return exit_code_of(
        "predict", lambda: predict(read(PredictOptions, arguments, "predict"))
    )


def predict(options: PredictOptions) -> int:
    """Write the classes of all pictures."""
    place = options.pictures
    if options.resume and options.out is None:
        raise UsageError("--resume goes on with --out, which is missing")
    names = sorted(files_below(place, Counter())) if place.is_dir() else [str(place)]
    if not (place.exists() and names):
        raise UsageError(f"{place} is not here, or empty; pass an image, or a folder")
    model, about = load_model(options.run, options.model)
    class_names = about["class_names"]
    top = min(options.top, len(class_names))
    written = 0
    reasons = dict[str, str]()  # why a file has no class
    with _opened(options, top) as (file, earlier), stoppable(STOPPING) as signals:
        start = place if place.is_dir() else place.parent
        # By the name that a line has.
        files = {printable(os.path.relpath(name, start)): name for name in names}
        places = [name for name in files if name not in earlier]
        names = [files[name] for name in places]
        rows = torch.arange(len(names))
        pictures = Pictures(Names(names), rows, {TEST: rows}, class_names)
        batches = scored_files(options, pictures, model, about, signals)
        for request, batch, scores in batches:
            reasons |= dict(batch.broken)
            best = scores.softmax(1).topk(top)
            predictions = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            lines = []
            for row in request.rows.tolist():
                reason = reasons.get(names[row], "")
                cells = [""] * 2 * top
                if not reason:
                    cells = []
                    for score, label in zip(*next(predictions), strict=True):
                        cells += [class_names[label], f"{score:.6f}"]
                lines.append([places[row], *cells, reason])
            _write(file, lines)
            written += len(lines)
    if signals:
        line = f"{written:,} of {len(names):,} files have a line"
        if options.out is not None:
            command = "the same command with --resume"
            line += f" in {options.out}; {command} writes the others"
        print(line, file=sys.stderr)
        return 128 + signals[0]
    if reasons and len(reasons) == len(names):
        raise UsageError(f"no picture can be read: {reasons[names[0]]}")
    if reasons:
        print(
            f"{len(reasons):,} of {len(names):,} files have no class; the column error "
            "says why",
            file=sys.stderr,
        )
    return 0


@contextlib.contextmanager
def _opened(options: PredictOptions, top: int) -> Iterator[tuple[Any, set[str]]]:
    """Open the table of the lines, and write their header. Yields it, and the files
    that have lines by an earlier process.
    """
    columns = ["file", "class", "score"]
    for number in range(2, top + 1):
        columns += [f"class_{number}", f"score_{number}"]
    columns.append("error")
    path = options.out
    if path is None:
        _write(sys.stdout, [columns])
        yield sys.stdout, set()
        return
    earlier = list[list[str]]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if options.resume and path.exists():
            earlier = _whole_lines(path)
        if earlier and earlier[0] != columns:
            raise UsageError(
                f"--resume: {path} has the columns {', '.join(earlier[0])}; pass the "
                "options that wrote it, or another --out"
            )
        with path.open("a" if earlier else "w", encoding="utf-8", newline="") as file:
            if not earlier:
                _write(file, [columns])
            yield file, {name for name, *_ in earlier[1:]}
    except OSError as error:
        raise unwritten(path, error) from error


def _whole_lines(path: Path) -> list[list[str]]:
    """Return the lines of a table, and cut off one that is not whole."""
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    os.truncate(path, length)
    return list(csv.reader(content[:length].decode().splitlines(keepends=True)))


def _write(file: Any, lines: Sequence[Sequence[str]]) -> None:
    """Write lines at once, so that they stay if the process is ended."""
    csv.writer(file, lineterminator="\n").writerows(lines)
    file.flush()


def scored_files(
    options: RunOptions,
    pictures: Pictures,
    model: Any,
    about: dict[str, Any],
    signals: Sequence[int],
) -> Iterator[tuple[BatchRequest, Images, Tensor]]:
    """Yield batches of files: the request with their rows, their readable images, and
    the scores of these, until there is a signal.

    Args:
        options: those of a command.
        pictures: the files, of which the part `TEST` is read.
        model: the model of a run.
        about: what `load_model` returned beside the model.
        signals: receives the numbers of signals.
    """
    settings = command_line.Options(
        image_size=about["image_shape"][1], augment="none", workers=options.workers
    )
    source = make_source(settings, pictures)
    number = len(pictures.parts.get(TEST, ()))
    requests = [BatchRequest(TEST, rows) for rows in torch.arange(number).split(_ROWS)]
    devices = choose_devices(options.devices)
    model = model.to(devices[0]).eval()
    size = options.micro_batch_size
    classes = len(about["class_names"])
    with (
        ScatterOnceParallel(model, device_ids=devices, micro_batch_size=size) as engine,
        Feed(source, requests) as feed,
        Progress(number, file=sys.stderr) as progress,
    ):
        for request, batch, scores in scored(engine, feed, number, classes):
            yield request, batch, scores
            progress.update(len(request.rows))
            if signals:
                return
