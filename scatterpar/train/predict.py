"""`python -m scatterpar predict`: write classes and scores of pictures, on all
devices.
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from scatterpar import ScatterOnceParallel
from scatterpar.train.command_line import (
    DEVICES,
    MICRO_BATCH_SIZE,
    WORKERS,
    UsageError,
    exit_code_of,
    option,
    printable,
    printed,
    read,
    say,
)
from scatterpar.train.data import TEST, BatchRequest, is_hidden, of_files
from scatterpar.train.feed import Feed
from scatterpar.train.models import load_model
from scatterpar.train.records import (
    Progress,
    accuracies_in_words,
    accuracy_per_class,
    stoppable,
    unwritten,
)
from scatterpar.train.training import choose_devices, scores_of

_ROWS = 256  # pictures of a batch, whose lines are written together
RUN = "folder of a training run, of which best.pt is taken, or one of its checkpoints"
MODEL = "allow the checkpoint to call this package.module:callable"


@dataclass(frozen=True)
class PredictOptions:
    """Write the classes of pictures, with their scores, as CSV: one line per file. Of
    folders of classes, print the accuracy, too.
    """

    examples: ClassVar[str] = """examples:
  python -m scatterpar predict runs/photos photos/new --out classes.csv --top 5
  python -m scatterpar predict runs/photos photos/test        accuracy of CLASS/1.jpg

The columns are file, class, score (class_2, score_2, … with --top), and error: why a
file has no class. Hidden files have no line. Lines are written as they are computed."""

    run: Path = option(None, RUN, "", kind=Path)
    pictures: tuple[Path, ...] = option(
        None,
        "pictures, or folders of pictures, which are searched recursively",
        "",
        kind=Path,
        nargs="+",
    )
    out: Path | None = option(
        None, "write there (default: standard output)", kind=Path, metavar="FILE"
    )
    resume: bool = option(False, "go on after the last line of --out")
    top: int = option(1, "classes of each picture", kind=int)
    micro_batch_size: int = option(64, MICRO_BATCH_SIZE, kind=int)
    devices: tuple[str, ...] = option((), DEVICES, nargs="+", metavar="DEVICE")
    workers: int | None = option(None, WORKERS, kind=int)
    model: str | None = option(None, MODEL, metavar="NAME")


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code: 0; 2: wrong argument, or no picture can be
    read; 130: interrupted.
    """
    return exit_code_of(
        "predict", lambda: predict(read(PredictOptions, arguments, "predict"))
    )


def predict(options: PredictOptions) -> int:
    """Write the classes of all pictures."""
    if options.resume and options.out is None:
        raise UsageError("--resume goes on with --out, which is missing")
    files = _files(options.pictures)
    model, about = load_model(options.run, options.model)
    class_names = about["class_names"]
    top = min(options.top, len(class_names))
    confusion = torch.zeros(len(class_names), len(class_names), dtype=torch.int64)
    reasons = dict[str, str]()  # why a file has no class
    lines_written = 0
    with (
        _opened(options, top) as (file, earlier),
        stoppable("stopping after the present images") as signals,
    ):
        # By the name that a line has.
        places = [name for name in files if name not in earlier]
        for start, scores, broken in _scored(options, files, places, model, about):
            reasons |= broken
            best = scores.softmax(1).topk(top)
            # Of readable pictures only, in the order of their lines.
            predictions = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            lines = []
            for place in places[start : start + _ROWS]:
                reason = reasons.get(files[place], "")
                cells = [""] * 2 * top
                if not reason:
                    values, numbers = next(predictions)
                    cells = []
                    for score, number in zip(values, numbers, strict=True):
                        cells += [class_names[number], f"{score:.6f}"]
                    true = _class_of(place, class_names)
                    if true is not None:
                        confusion[true, numbers[0]] += 1
                lines.append([place, *cells, reason])
            _write(file, lines)
            lines_written += len(lines)
            if signals:
                break
    if signals and lines_written < len(places):
        line = f"{lines_written:,} of {len(places):,} files have a line"
        if options.out is not None:
            command = "the same command with --resume"
            line += f" in {options.out}; {command} writes the others"
        print(line, file=sys.stderr)
        return 128 + signals[0]
    # A folder of other files, such as a wrong one, is an error.
    if reasons and len(reasons) == len(places):
        raise UsageError(f"no picture can be read: {reasons[files[places[0]]]}")
    if reasons:
        print(
            f"{len(reasons):,} of {len(places):,} files have no class; the column "
            "error says why",
            file=sys.stderr,
        )
    number = int(confusion.sum())
    if number:
        accuracy = float(confusion.diagonal().sum()) / number
        per_class = accuracy_per_class(confusion, class_names)
        say(
            f"accuracy: {accuracy:.2%} of {number:,} pictures in folders of classes",
            accuracies_in_words(per_class),
            file=sys.stderr,
        )
    return 0


def _files(pictures: Sequence[Path]) -> dict[str, str]:
    """Return the files below the folders, and single ones, by the name that a line has:
    from the folder, if there is one folder, else as it was passed.
    """
    files = {}
    for place in pictures:
        names = [str(place)]
        start = place.parent
        if place.is_dir():
            names = sorted(_files_below(place))
            start = place
        if not (place.exists() and names):
            raise UsageError(
                f"{place} is not here, or empty; pass an image, or a folder"
            )
        for name in names:
            shown = os.path.relpath(name, start) if len(pictures) == 1 else name
            files[printable(shown)] = name
    return files


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the files in a folder, at any depth, except hidden ones."""
    visited = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        target = os.path.realpath(place)
        if target in visited:  # by a link, which may lead up
            folders.clear()
            continue
        visited.add(target)
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in names:
            if not is_hidden(name):
                yield os.path.join(place, name)


def _class_of(place: str, class_names: Sequence[str]) -> int | None:
    """Return the class whose folder a file is in, if it is one."""
    folder = os.path.basename(os.path.dirname(place))
    name = unicodedata.normalize("NFC", folder)
    return class_names.index(name) if name in class_names else None


def _scored(
    options: PredictOptions,
    files: dict[str, str],
    places: Sequence[str],
    model: Any,
    about: dict[str, Any],
) -> Iterator[tuple[int, torch.Tensor, dict[str, str]]]:
    """Yield for each batch of files the number of the first one, the scores of those
    that can be read, and why others cannot.
    """
    names = [files[place] for place in places]
    source = of_files(names, about["image_shape"][1], options.workers)
    requests = []
    for rows in torch.arange(len(names)).split(_ROWS) if names else ():
        requests.append(BatchRequest(TEST, rows))
    devices = choose_devices(options.devices)
    model = model.to(torch.device(devices[0])).eval()
    size = options.micro_batch_size
    classes = len(about["class_names"])
    with (
        ScatterOnceParallel(model, device_ids=devices, micro_batch_size=size) as engine,
        Feed(source, requests, are_all_readable=False) as feed,
        Progress(len(names), file=sys.stderr) as progress,
    ):
        for request in requests:
            _, batch = feed.take()
            with torch.no_grad():
                scores = scores_of(engine, batch.images, classes)
            yield int(request.rows[0]), scores, dict(batch.broken)
            progress.update(len(request.rows))


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
    if file is sys.stdout:
        lines = [[printed(cell) for cell in line] for line in lines]
    csv.writer(file, lineterminator="\n").writerows(lines)
    file.flush()
