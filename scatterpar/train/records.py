"""What a run writes and shows: a lock, checkpoints, lines of JSON, figures, a bar; and
what a test counts.

Checkpoints are written atomically, records line by line.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor, nn
from tqdm import tqdm

from scatterpar.train.command_line import LOCK_FILE, METRICS_FILE, UsageError, words_of

FILE = "checkpoint.pt"
BEST_FILE = "best.pt"
CURVES_FILE = "curves.png"
CONFUSION_FILE = "confusion.png"
MISTAKES_FILE = "mistakes.png"
FIRST_BATCH_FILE = "first_batch.png"
FINISHED = "finished"  # the ending of a run that used all epochs
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORMAT = 7
# Models of earlier versions are the same, but not their runs: `--val` held out other
# pictures, which a run that goes on would train on, and test on.
_FORMATS_OF_MODELS = (5, 6, _FORMAT)
TOP_5_CLASSES = 10  # with fewer, top-5 accuracy says little
_CONFUSION_CLASSES = 1000  # with more, the matrix would take more than 8 MB
_SHOWN_CLASSES = 20  # with their accuracy, in a line
_COUNTED_CLASSES = 20  # with more, a confusion matrix is too wide for its numbers
_NAMED_CLASSES = 40  # of a confusion matrix; with more, names would overlap
_MISTAKES = 24  # that are kept to be drawn
# What a tally adds up: images, their loss, those whose class has the highest score, and
# those whose class has one of the five highest.
_IMAGES, _LOSS, _RIGHT, _IN_TOP5 = range(4)
_TILES = 48  # images of a mosaic
_TILES_PER_LINE = 8
_TILE_INCHES = 1.5
_DPI = 120
_LINE_SECONDS = 10.0  # between lines of progress, without a terminal
_LINE = "{desc}{percentage:.0f}%, {rate_fmt}, {remaining} left{postfix}"
# tqdm's own lock is a semaphore of the system, which a killed process leaves behind.
tqdm.set_lock(threading.RLock())


def unwritten(path: Path, error: OSError) -> UsageError:
    """Return the error of a file that cannot be written."""
    return UsageError(f"--out: {path} cannot be written: {error.strerror or error}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file in memory, which replaces `path` when the body ends, after it was
    written to the disk.
    """
    # In memory: torch would hide the system's reason why a write fails.
    content = io.BytesIO()
    yield content
    aside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            # Otherwise a power cut could leave the new name with an empty file.
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # it exists only after an error
            aside.unlink()


def save(path: Path, **state: Any) -> None:
    """Write a checkpoint. At any time `path` is the old one or the new one."""
    with written(path) as file:
        torch.save({"format": _FORMAT, **state}, file)


def load(path: Path, *, goes_on: bool = False) -> dict[str, Any]:
    """Read a checkpoint; no code in the file is executed.

    Raises a `UsageError` if it is no checkpoint of this version, or, unless the run
    `goes_on`, of an earlier one.
    """
    try:
        # A checkpoint from elsewhere could execute anything if it were unpickled.
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no {path}; name the folder of a run that has written it"
        ) from error
    except Exception as error:
        problem = f"is not a checkpoint that can be read: {words_of(error):.200}"
        raise UsageError(f"{path} {problem}") from error
    file_format = state.get("format") if isinstance(state, dict) else None
    formats = (_FORMAT,) if goes_on else _FORMATS_OF_MODELS
    if file_format not in formats:
        raise UsageError(
            f"{path} is a checkpoint of another program or version: use the version "
            "that wrote it, or start a new run with another --out (earlier versions "
            "held out other pictures: predict and export take their runs as they are)"
        )
    return state  # type: ignore[no-any-return]


def locked(folder: Path, goes_on: bool = True) -> Any:
    """Lock a folder: no other run writes into it until the returned context ends. The
    system ends the lock with the process, however that ends.

    Unless the run `goes_on`, raises a `UsageError` if there are results in the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK_FILE, timeout=0).acquire()
    except Timeout as error:
        raise UsageError(
            f"another run is writing into {folder}: wait for its end, or pass another "
            "--out"
        ) from error
    except OSError as error:
        raise unwritten(folder / METRICS_FILE, error) from error
    if not goes_on:
        refuse_earlier_run(folder)  # it may have begun meanwhile
    return lock


def refuse_earlier_run(folder: Path) -> None:
    """Raise a `UsageError` if a run has left results in the folder."""
    # A run that ended before its first step has left nothing to lose.
    steps = [record for record in read_records(folder) if record["kind"] == "step"]
    if steps or (folder / BEST_FILE).exists() or (folder / FILE).exists():
        raise UsageError(
            f"{folder} has a run of {len(steps)} steps: --resume goes on from its "
            f"{FILE}, if there is one; another --out starts anew"
        )


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder's earlier sessions; a torn last line is left
    out.
    """
    records = []
    path = folder / METRICS_FILE
    if path.is_file():
        with contextlib.suppress(json.JSONDecodeError):
            for line in path.read_text(encoding="utf-8").splitlines():
                records.append(json.loads(line))
    return records


def is_finished(folder: Path) -> bool:
    """Whether the folder's run has used all epochs, and written its results."""
    records = read_records(folder)
    return bool(records) and records[-1].get("ending") == FINISHED


class Metrics(contextlib.AbstractContextManager["Metrics"]):
    """Records in memory and as lines of JSON, each with its `"kind"`; for TensorBoard,
    too.

    The records of the first `earlier_steps` steps of earlier sessions stay in the file.
    """

    def __init__(self, path: Path, earlier_steps: int = 0) -> None:
        self.records: list[dict[str, Any]] = []
        if earlier_steps:
            for record in read_records(path.parent):
                if record["kind"] != "summary" and record["step"] <= earlier_steps:
                    self.records.append(record)
        # The start of the first session, as if sessions followed each other at once.
        earlier = [record["elapsed"] for record in self.records]
        self._start = time.perf_counter() - max(earlier, default=0.0)
        with written(path) as file:
            for record in self.records:
                file.write(f"{json.dumps(record)}\n".encode())
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = _open_board(path.parent, earlier_steps)

    @property
    def elapsed(self) -> float:
        """The seconds of all sessions."""
        return time.perf_counter() - self._start

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record, with the seconds that have passed. NaN and infinities,
        which JSON lacks, become null.
        """
        # Paths become texts.
        fields["elapsed"] = self.elapsed
        text = json.dumps({"kind": kind, **fields}, default=str)
        record = json.loads(text, parse_constant=lambda _: None)
        self.records.append(record)
        try:
            print(json.dumps(record), file=self._file, flush=True)
        except OSError as error:
            raise unwritten(Path(self._file.name), error) from error
        if self._board is not None and kind in ("step", "epoch"):
            for name, value in record.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, record["step"])

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def __exit__(self, *_: object) -> None:
        for file in (self._file, self._board):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk was reported before
                    file.close()


def _open_board(folder: Path, earlier_steps: int) -> Any:
    """Return TensorBoard's writer, or None if it is not installed."""
    try:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    # TensorBoard drops the steps from `purge_step` on.
    return tensorboard.SummaryWriter(str(folder), purge_step=earlier_steps + 1)


@contextlib.contextmanager
def stoppable(announcement: str) -> Iterator[list[int]]:
    """In the body, Ctrl-C and SIGTERM print the announcement, and are added to a list.
    A second one ends the process.
    """
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if received:
            # Not by an exception, which a library that waits for something could catch.
            os._exit(128 + number)
        received.append(number)
        name = signal.Signals(number).name
        line = f"\n{name}: {announcement}; again: ending now\n"
        # Not print: the signal may have interrupted a print.
        os.write(2, line.encode())

    handlers_before = {}
    for number in SIGNALS:
        # A background job of a shell ignores SIGINT.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


class Mistake(NamedTuple):
    """An image whose class was not predicted, and the score of the predicted one."""

    score: float
    true: int
    predicted: int
    image: Tensor


class Tally:
    """Sums over the images of a test.

    Attributes:
        part: what was tested, such as ``"test"``.
        mistakes: the mistakes with the highest scores, the highest first.
        confusion: the number of images by class and by the class that the model chose;
            None for very many classes.
    """

    def __init__(self, classes: int, part: str) -> None:
        self.part = part
        self.confusion: Tensor | None = None
        if classes <= _CONFUSION_CLASSES:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        self.mistakes: list[Mistake] = []
        # Single precision would lose images beyond 2^24.
        self._sums = torch.zeros(4, dtype=torch.float64)

    def add(self, scores: Tensor, labels: Tensor, images: Tensor) -> None:
        """Add the images of a batch, with their scores and labels."""
        best = scores.topk(min(5, scores.shape[1])).indices
        predicted = best[:, 0]
        in_top5 = best == labels[:, None]
        is_right = in_top5[:, 0]
        loss = F.cross_entropy(scores, labels, reduction="sum")
        # In the order of _IMAGES, _LOSS, _RIGHT and _IN_TOP5.
        sums = [len(labels), loss, is_right.sum(), in_top5.sum()]
        self._sums += torch.tensor(sums, dtype=torch.float64)
        if self.confusion is not None:
            places = (labels, predicted)
            # Accumulated, because a place may come several times in a batch.
            self.confusion.index_put_(places, torch.tensor(1), accumulate=True)
        confidence = scores.softmax(1).amax(1).masked_fill(is_right, 0)
        # Right ones, which are zero now, are behind all wrong ones.
        num_wrong = int((~is_right).sum())
        highest, rows = confidence.topk(min(_MISTAKES, num_wrong))
        true_classes = labels[rows].tolist()
        wrong_classes = predicted[rows].tolist()
        # A copy, because the batch is freed.
        wrong_images = images[rows]
        for number, score in enumerate(highest.tolist()):
            mistake = Mistake(
                score,
                true_classes[number],
                wrong_classes[number],
                wrong_images[number],
            )
            self.mistakes.append(mistake)
        self.mistakes.sort(key=lambda mistake: -mistake.score)
        del self.mistakes[_MISTAKES:]

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self._sums[_IMAGES])

    @property
    def loss(self) -> float:
        """The mean loss of an image."""
        return self._mean(_LOSS)

    @property
    def accuracy(self) -> float:
        """The part of the images whose class was chosen."""
        return self._mean(_RIGHT)

    @property
    def accuracy_top5(self) -> float:
        """The part of the images whose class has one of the five highest scores."""
        return self._mean(_IN_TOP5)

    def _mean(self, column: int) -> float:
        return float(self._sums[column] / max(1, self.images))


def accuracy_per_class(
    confusion: Tensor, class_names: Sequence[str]
) -> dict[str, float | None]:
    """Return the accuracy of each class, the lowest first; None, at the end, of classes
    that have no images.
    """
    measured = confusion.diagonal() / confusion.sum(1)  # NaN without images
    accuracies: dict[str, float | None] = {}
    # Sorting has NaN at the end.
    for row in measured.argsort(stable=True).tolist():
        accuracy = float(measured[row])
        accuracies[class_names[row]] = None if math.isnan(accuracy) else accuracy
    return accuracies


def accuracies_in_words(accuracies: Mapping[str, float | None]) -> str:
    """Return a line with the accuracy of each class; of very many, the lowest ones."""
    texts = []
    for name, accuracy in accuracies.items():
        shown = "-" if accuracy is None else f"{accuracy:.1%}"
        texts.append(f"{name} {shown}")
    title = "accuracy per class"
    if len(texts) > _SHOWN_CLASSES:
        title = f"lowest accuracies of {len(texts):,} classes"
    return f"{title}: {', '.join(texts[:_SHOWN_CLASSES])}"


def _save_figure(figure: Figure, path: Path) -> None:
    with written(path) as file, warnings.catch_warnings():
        # Letters that matplotlib's font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(file, dpi=_DPI)


def draw_curves(metrics: Metrics, path: Path, *, images: int, tested: str) -> None:
    """Draw loss and accuracy over epochs.

    Args:
        metrics: the records of the run.
        path: the file.
        images: the number of images of an epoch.
        tested: the part that each epoch was tested on, as in the names of records.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    steps = metrics.of_kind("step")
    epochs = metrics.of_kind("epoch")
    # Steps differ in their images, and so in their part of an epoch.
    epochs_of_steps = _values(steps, "images").cumsum() / images
    loss.plot(epochs_of_steps, _values(steps, "loss"), label="training loss")
    for axes, title in ((loss, "Loss"), (accuracy, "Accuracy")):
        quantity = title.lower()
        values = _values(epochs, f"{tested}_{quantity}")
        label = f"{tested} {quantity}"
        axes.plot(_values(epochs, "epoch"), values, "o-", label=label, markersize=4)
        axes.set(title=title, xlabel="Epoch", xlim=(0, None))
        # Whole epochs.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    _save_figure(figure, path)


def _values(records: Sequence[dict[str, Any]], name: str) -> Any:
    # A null, which JSON has for NaN, becomes NaN again.
    return np.array([record[name] for record in records], dtype=float)


def draw_confusion(
    confusion: Tensor, class_names: Sequence[str], title: str, path: Path
) -> None:
    """Draw which classes were predicted: a row per true class, with its images."""
    classes = len(class_names)
    side = min(4 + 0.35 * classes, 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    parts = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    cells = axes.imshow(parts.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(cells, shrink=0.8, format=PercentFormatter(1.0))
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= _NAMED_CLASSES:
        # Names with dollars are no formulas.
        style: dict[str, Any] = {"parse_math": False, "rotation_mode": "anchor"}
        axes.set_xticks(range(classes), class_names, rotation=45, ha="right", **style)
        axes.set_yticks(range(classes), class_names, **style)
    if classes <= _COUNTED_CLASSES:
        for row, column in confusion.nonzero().tolist():
            number = str(confusion[row, column].item())
            # Cells of more than a half are dark.
            colour = "white" if parts[row, column] > 0.5 else "black"
            axes.text(column, row, number, color=colour, ha="center", va="center")
    _save_figure(figure, path)


def draw_first_batch(
    images: Tensor, labels: Tensor, class_names: Sequence[str], path: Path
) -> None:
    """Draw the first images of a batch as the network sees them, each with its
    class.
    """
    names = [f"{class_names[label]:.16}" for label in labels[:_TILES].tolist()]
    _draw_images(list(images[:_TILES]), names, path)


def draw_mistakes(
    mistakes: Sequence[Mistake], class_names: Sequence[str], path: Path
) -> None:
    """Draw the images whose wrong class has the highest scores."""
    texts = []
    for mistake in mistakes:
        # With 16 letters, neighbours do not overlap.
        true = f"true {class_names[mistake.true]:.16}"
        predicted = f"predicted {class_names[mistake.predicted]:.16}"
        texts.append(f"{true}\n{predicted} {mistake.score:.0%}")
    _draw_images([mistake.image for mistake in mistakes], texts, path)


def _draw_images(images: Sequence[Tensor], texts: Sequence[str], path: Path) -> None:
    """Draw images with a text above each, or an empty picture."""
    columns = min(_TILES_PER_LINE, len(images)) or 1
    lines = math.ceil(len(images) / columns) or 1
    size = _TILE_INCHES * columns, _TILE_INCHES * lines
    figure = Figure(figsize=size)
    # One axes for all images: one for each would take a second.
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, columns), ylim=(lines, 0))
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        line, column = divmod(number, columns)
        # Of grey images, matplotlib wants no axis of channels.
        pixels = image.permute(1, 2, 0).squeeze(2).numpy()
        place = (column + 0.1, column + 0.9, line + 0.97, line + 0.17)
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=place, aspect="auto")
        style: dict[str, Any] = {"parse_math": False, "ha": "center", "va": "bottom"}
        axes.text(column + 0.5, line + 0.15, text, fontsize=6, **style)
    axes.set(xlim=(0, columns), ylim=(lines, 0))  # `imshow` has changed them
    _save_figure(figure, path)


class _Lines:
    """A file for tqdm, which gets a line in the place of each drawing of a bar.

    It raises no error, such as that of a pipe that nobody reads: tqdm would keep its
    lock, for which the other threads of a step wait. The run's next line raises it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        line = text.strip()  # tqdm returns to the start of a line, and clears it
        if line:
            with contextlib.suppress(OSError):
                print(line, file=self._file)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class Progress(tqdm):  # type: ignore[misc]
    """A bar of images, which several threads may move. If stderr is no terminal, there
    are lines instead.
    """

    def __init__(self, total: int, done: int = 0, *, file: TextIO) -> None:
        # tqdm starts no thread: every batch of images updates the bar.
        tqdm.monitor_interval = 0
        self._limit = total
        self._has_lines = not sys.stderr.isatty()
        options: dict[str, Any] = {}
        if self._has_lines:
            options["file"] = _Lines(file)
            options["bar_format"] = _LINE
            options["mininterval"] = _LINE_SECONDS
            options["delay"] = _LINE_SECONDS
        # A terminal may not know its size; tqdm would show nothing in one of 0 x 0.
        size = shutil.get_terminal_size()
        super().__init__(
            total=total,
            ncols=size.columns - 1,
            nrows=size.lines,
            initial=done,
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
            **options,
        )

    def describe(self, words: str, **numbers: str) -> None:
        """Show words before the bar, and numbers after it."""
        with self.get_lock():
            self.set_description(words, refresh=False)
            self.set_postfix(numbers, refresh=not self._has_lines)

    def begin(self, images: int) -> None:
        """Begin with so many images, beyond which `add` does not move the bar."""
        self._limit = self.n + images

    def add(self, _: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        """Move the bar by the rows whose loss was computed, in any thread. This is a
        forward hook of a criterion: it moves the bar within a step.
        """
        with self.get_lock():
            self.update(min(len(inputs[0]), self._limit - self.n))

    def report(self, done: int) -> None:
        """Set the bar to the images that are done."""
        with self.get_lock():
            self.update(done - self.n)
