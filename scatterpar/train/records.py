"""The files of a run: a lock, checkpoints, written atomically, and records, in lines of
JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TextIO

import torch
from filelock import FileLock, Timeout

from scatterpar.train.command_line import UsageError, words_of

FILE = "checkpoint.pt"
BEST_FILE = "best.pt"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"
FINISHED = "finished"  # the ending of a run that used all epochs
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORMAT = 6
# Models of 0.4 are the same, but not its runs: --val held out other pictures, which a
# run that goes on would train on, and test on.
_FORMAT_OF_0_4 = 5


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
    `goes_on`, of 0.4.
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
    formats = (_FORMAT,) if goes_on else (_FORMAT, _FORMAT_OF_0_4)
    if file_format not in formats:
        raise UsageError(
            f"{path} is a checkpoint of another program or version: use the version "
            "that wrote it, or start a new run with another --out (0.4 held out other "
            "pictures: predict, test and export take its runs as they are)"
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
    Without `is_written` there is no file.
    """

    def __init__(
        self, path: Path, earlier_steps: int = 0, is_written: bool = True
    ) -> None:
        self.records: list[dict[str, Any]] = []
        if earlier_steps:
            for record in read_records(path.parent):
                if record["kind"] != "summary" and record["step"] <= earlier_steps:
                    self.records.append(record)
        # The start of the first session, as if sessions followed each other at once.
        earlier = [record["elapsed"] for record in self.records]
        self._start = time.perf_counter() - max(earlier, default=0.0)
        self._file: TextIO | None = None
        self._board: Any = None
        if not is_written:
            return
        with written(path) as file:
            for record in self.records:
                file.write(f"{json.dumps(record)}\n".encode())
        self._file = path.open("a", encoding="utf-8")
        self._board = _open_board(path.parent, earlier_steps)

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
        if self._file is None:
            return
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
def stoppable(announcement: str | None) -> Iterator[list[int]]:
    """In the body, Ctrl-C and SIGTERM print the announcement, if there is one, and are
    added to a list. A second one ends the process.
    """
    received = list[int]()

    def receive(number: int, _: FrameType | None) -> None:
        if received:
            # Not by an exception, which a library that waits for something could catch.
            os._exit(128 + number)
        received.append(number)
        if announcement is None:
            return
        name = signal.Signals(number).name
        line = f"\n{name}: {announcement}; again: ending now\n"
        # Not print: the signal may have interrupted a print.
        os.write(2, line.encode())

    with received_by(receive):
        yield received


@contextlib.contextmanager
def received_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """In the body, a function receives Ctrl-C and SIGTERM."""
    handlers_before = {}
    for number in SIGNALS:
        # A background job of a shell ignores SIGINT.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
