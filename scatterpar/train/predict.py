"""`python -m scatterpar predict`: write classes and scores of pictures, on all
devices.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import torch
import tyro
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.train import command_line
from scatterpar.train.command_line import UsageError, exit_code_of, printable, read
from scatterpar.train.data import BatchRequest, Images, make_pictures
from scatterpar.train.feed import Feed
from scatterpar.train.folders import endings, files_below, is_picture
from scatterpar.train.models import load_model
from scatterpar.train.parts import TEST, Files, Unused
from scatterpar.train.progress import Progress
from scatterpar.train.records import stoppable, unwritten
from scatterpar.train.training import choose_devices, scored

_ROWS = 256  # pictures of a batch, whose lines are written together
_STOPPING = "stopping after the present images"


@dataclass(frozen=True)
class PredictOptions:
    """Write the classes of pictures, with their scores, as CSV: one line per file."""

    examples: ClassVar[str] = """examples:
  python -m scatterpar predict runs/photos photos/new --out classes.csv --top 5

The columns are file, class, score (class_2, score_2, … with --top), and error: why a
file has no class. Hidden files have no line. Lines are written as they are computed."""

    # folder of a training run, of which best.pt is taken, or one of its checkpoints
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    # a picture, or a folder of pictures, which is searched recursively
    pictures: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PICTURES")]
    out: command_line.Folder = None  # write there (default: standard output)
    resume: bool = False  # go on after the last line of --out
    top: int = 1  # classes of each picture
    micro_batch_size: int = 64  # pictures of a sub-step of each device
    # such as cuda:0,cuda:1 or cuda:0 cuda:1 (default: every GPU, or the CPU)
    devices: command_line.Devices = ()
    # reading processes (default: one per core, at most 16; 0: none)
    workers: command_line.Number = None
    # allow the checkpoint to call this package.module:callable
    model: command_line.Name = None
    # has no effect any more: a picture that cannot be read has a line with the reason
    skip_broken: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code: 0; 2: wrong argument, or no picture can be
    read; 130: interrupted.
    """
    return exit_code_of(
        "predict", lambda: predict(read(PredictOptions, arguments, "predict"))
    )


def predict(options: PredictOptions) -> int:
    """Write the classes of all pictures."""
    pictures = options.pictures
    if not pictures.exists():
        raise UsageError(f"{pictures} is not here; pass an image or a folder of images")
    if options.resume and options.out is None:
        raise UsageError("--resume goes on with --out, which is missing")
    model, about = load_model(options.run, options.model)
    class_names = about["class_names"]
    reasons = dict[str, str]()  # why a file has no class
    names = [str(pictures)]
    start = pictures.parent
    if pictures.is_dir():
        names = _find_files(pictures, reasons)
        start = pictures
    top = min(options.top, len(class_names))
    with Table(options, start, top) as table, stoppable(_STOPPING) as signals:
        names = [name for name in names if not table.has(name)]
        images = [name for name in names if name not in reasons]
        for batch, scores in scored_files(options, images, model, about, signals):
            reasons |= dict(batch.broken)
            values, labels = scores.softmax(1).topk(top)
            # The label of a file is its row.
            for row, row_values, row_labels in zip(
                batch.labels.tolist(), values.tolist(), labels.tolist(), strict=True
            ):
                chosen = [class_names[label] for label in row_labels]
                table.add(images[row], list(zip(chosen, row_values, strict=True)))
            table.write(names, reasons)
        if not images:
            table.write(names, reasons)
    if signals:
        return _say_interrupted(options, table, len(names), signals[0])
    failed = [reasons[name] for name in names if name in reasons]
    if failed and len(failed) == len(names):
        raise UsageError(f"no picture can be read: {failed[0]}")
    if failed:
        print(
            f"{len(failed):,} of {len(names):,} files have no class; the column error "
            "says why",
            file=sys.stderr,
        )
    return 0


def _say_interrupted(
    options: PredictOptions, table: Table, files: int, number: int
) -> int:
    """Print what was written, and how to go on. Returns the exit code."""
    line = f"{table.lines:,} of {files:,} files have a line"
    if options.out is not None:
        line += f" in {options.out}; the same command with --resume writes the others"
    print(line, file=sys.stderr)
    return 128 + number


def _find_files(folder: Path, reasons: dict[str, str]) -> list[str]:
    """Return the files in a folder, sorted. Adds the reason of each that is no
    picture.
    """
    listed = ", ".join(endings())
    names = sorted(files_below(folder, Unused()))
    for name in names:
        if not is_picture(name):
            reasons[name] = f"its name does not end in {listed}"
    if len(reasons) == len(names):
        raise UsageError(f"{folder} lacks pictures: files that end in {listed}")
    return names


def scored_files(
    options: Any,
    names: Sequence[str],
    model: Any,
    about: dict[str, Any],
    signals: Sequence[int],
    labels: Sequence[int] | None = None,
) -> Iterator[tuple[Images, Tensor]]:
    """Yield the readable images of each batch of files, with their scores, until there
    is a signal.

    Args:
        options: those of a command, with devices and workers.
        names: the files.
        model: the model of a run, and what `load_model` returned about it.
        about: the same.
        signals: receives the numbers of signals.
        labels: the labels of the files; by default their rows.
    """
    if not names:
        return
    files = Files(list(zip(names, labels or range(len(names)), strict=True)))
    settings = command_line.Options(
        image_size=about["image_shape"][1], augment="none", workers=options.workers
    )
    source = make_pictures(settings, files, files, about["class_names"])
    devices = choose_devices(options.devices)
    rows_of_batches = torch.arange(len(files)).split(_ROWS)
    done = 0
    with (
        ScatterOnceParallel(
            model.to(devices[0]).eval(),
            device_ids=devices,
            micro_batch_size=options.micro_batch_size,
        ) as engine,
        Feed(source, [BatchRequest(TEST, rows) for rows in rows_of_batches]) as feed,
        Progress(len(files), file=sys.stderr) as progress,
    ):
        classes = len(about["class_names"])
        for request, batch, scores in scored(engine, feed, len(files), classes):
            yield batch, scores
            done += len(request.rows)
            progress.report(done, f"{done:,} of {len(files):,} images")
            if signals:
                return


class Table(contextlib.AbstractContextManager["Table"]):
    """The lines of `predict`, in a file or on standard output, in the order of the
    files' names.

    Attributes:
        lines: the number of files that have a line by this process.
    """

    def __init__(self, options: PredictOptions, start: Path, top: int) -> None:
        self._path = options.out
        self._start = start
        self._predictions = dict[str, list[tuple[str, float]]]()
        self._empty = [""] * 2 * top
        self._earlier = set[str]()  # files with lines of an earlier process
        self.lines = 0
        self._header = ["file", "class", "score"]
        for number in range(2, top + 1):
            self._header += [f"class_{number}", f"score_{number}"]
        self._header.append("error")
        self._file: BinaryIO | None = None
        length = 0
        if options.resume and options.out is not None and options.out.exists():
            length = self._read_earlier(options.out)
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("r+b" if length else "wb")
            except OSError as error:
                raise unwritten(self._path, error) from error
            self._file.seek(length)
            self._file.truncate()
        if not length:
            self._print([self._header])

    def _read_earlier(self, path: Path) -> int:
        """Note the files that have lines. Returns the bytes of the whole lines."""
        content = path.read_bytes()
        length = content.rfind(b"\n") + 1
        text = os.fsdecode(content[:length])
        rows = list(csv.reader(io.StringIO(text)))
        if rows and rows[0] != self._header:
            raise UsageError(
                f"--resume: {path} has the columns {', '.join(rows[0])}; pass the "
                "options that wrote it, or another --out"
            )
        self._earlier.update(row[0] for row in rows[1:])
        return length

    def has(self, name: str) -> bool:
        """Whether an earlier process has written the file's line."""
        return os.path.relpath(name, self._start) in self._earlier

    def add(self, name: str, prediction: list[tuple[str, float]]) -> None:
        """Add the classes of a file, with their scores."""
        self._predictions[name] = prediction

    def write(self, names: Sequence[str], reasons: Mapping[str, str]) -> None:
        """Write the next lines, up to the first file that has neither classes nor a
        reason.
        """
        rows = []
        for name in names[self.lines :]:
            if name in reasons:
                cells = self._empty
            elif name in self._predictions:
                cells = []
                for class_name, score in self._predictions.pop(name):
                    cells += [class_name, f"{score:.6f}"]
            else:
                break
            place = os.path.relpath(name, self._start)
            rows.append([place, *cells, reasons.get(name, "")])
        self.lines += len(rows)
        self._print(rows)

    def _print(self, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        if self._file is None:
            sys.stdout.write(printable(text.getvalue()))
            sys.stdout.flush()
            return
        try:
            self._file.write(os.fsencode(text.getvalue()))
            self._file.flush()
        except OSError as error:
            assert self._path is not None
            raise unwritten(self._path, error) from error

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk was reported before
                self._file.close()
