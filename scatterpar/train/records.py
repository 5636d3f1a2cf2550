"""The files of a run: checkpoints, written atomically; records, in lines of JSON;
curves.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from scatterpar.train.options import UsageError, words_of

FILE, BEST_FILE = "checkpoint.pt", "best.pt"
_FORMAT = 5


def unwritten(path: Path, error: Exception) -> UsageError:
    """Return the error of a file that cannot be written."""
    words = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return UsageError(f"--out: {path} cannot be written: {words}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the body ends, after it was written to the
    disk.
    """
    aside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, if a write fails
        raise unwritten(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # it exists only after an error
            aside.unlink()


def save(path: Path, **state: Any) -> None:
    """Write a checkpoint. At any time `path` is the old one or the new one."""
    with written(path) as file:
        torch.save({"format": _FORMAT, **state}, file)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; no code in the file is executed."""
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        words = f"is not a checkpoint that can be read: {words_of(error):.200}"
        raise UsageError(f"{path} {words}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != _FORMAT:
        which = "scatterpar 0.2" if found == 3 else "another program or version"
        words = (
            "cannot read: use the version that wrote it, or start a new run with "
            "another --out"
        )
        raise UsageError(
            f"{path} is a checkpoint of {which}, which scatterpar 0.3 {words}"
        )
    return state  # type: ignore[no-any-return]


class Metrics(contextlib.AbstractContextManager["Metrics"]):
    """Records in memory and as lines of JSON, each with its `"kind"`; for TensorBoard,
    too.

    The records of the first `earlier_steps` steps of earlier sessions stay in the file.
    """

    def __init__(self, path: Path, earlier_steps: int = 0) -> None:
        self.records: list[dict[str, Any]] = []
        # a torn last line
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            for line in (
                path.read_text(encoding="utf-8").splitlines() if earlier_steps else ()
            ):
                record = json.loads(line)
                if record["kind"] != "summary" and record["step"] <= earlier_steps:
                    self.records.append(record)
        with written(path) as file:
            file.writelines(
                f"{json.dumps(record)}\n".encode() for record in self.records
            )
        self._file, self._board = path.open("a", encoding="utf-8"), None
        with contextlib.suppress(ImportError):
            module = importlib.import_module("torch.utils.tensorboard")
            # TensorBoard drops the steps from `purge_step` on.
            self._board = module.SummaryWriter(
                str(path.parent), purge_step=earlier_steps + 1
            )

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record; NaN and infinities, which JSON lacks, become null."""
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
        with contextlib.suppress(OSError):  # a full disk was reported before
            for file in (self._file, self._board):
                if file is not None:
                    file.close()


def draw_curves(metrics: Metrics, path: Path) -> None:
    """Draw loss and accuracy."""
    from matplotlib.figure import Figure

    steps, tested = metrics.of_kind("step"), metrics.of_kind("epoch")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for axes, what, x, y, style, label in (
        (loss, steps, "step", "loss", "-", "training loss"),
        (loss, tested, "step", "test_loss", "o-", "test loss"),
        (accuracy, tested, "epoch", "test_accuracy", "o-", "Top-1 accuracy"),
        (accuracy, tested, "epoch", "test_accuracy_top5", "o:", "Top-5 accuracy"),
    ):
        heights = [math.nan if r[y] is None else r[y] for r in what]
        axes.plot([r[x] for r in what], heights, style, label=label, markersize=4)
        axes.set(
            title="Loss" if axes is loss else "Test accuracy", xlabel=x.capitalize()
        )
        axes.legend()
    with written(path) as file:
        figure.savefig(file, dpi=120)
