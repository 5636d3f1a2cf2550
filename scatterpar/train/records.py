"""The records of a run: a file of JSON lines, and TensorBoard's where that is installed."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from scatterpar.train.errors import UsageError

_NEEDED = {"matplotlib": "matplotlib", "PIL": "pillow", "tqdm": "tqdm"}


class Metrics:
    """A file with one JSON object a line, each with its `"kind"`, and the same in memory.

    Numbers that JSON does not have (NaN, infinities) are written as null.

    Args:
        path: the file; made anew, with its folder. None: keep the records in memory alone.
        kept: steps of an earlier attempt whose records in the file stay.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path | None, kept: int = 0) -> None:
        self.records: list[dict[str, Any]] = []
        self._path = path
        self.board: Any = None  # gets the numbers too: a `SummaryWriter` of torch's
        self._file: TextIO | None = None
        if path is None:
            return
        self.records = _earlier_records(path, kept) if kept else []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + ".part")
            aside.write_text("".join(map(_line, self.records)), encoding="utf-8")
            os.replace(aside, path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record.

        Raises:
            UsageError: the file cannot be written.
        """
        record = {"kind": kind, **{name: _plain(value) for name, value in fields.items()}}
        self._append(record)
        if self.board is not None and kind in ("step", "epoch"):
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{kind}/{name}", value, record["step"])

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._file is not None:
            try:
                self._file.write(_line(record))
                self._file.flush()
            except OSError as error:
                raise _unwritable(self._path, error) from error

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # of a full disk: it was said before
            if self._file is not None:
                self._file.close()
            if self.board is not None:
                self.board.close()


def open_board(folder: Path, step: int) -> Any:
    """Open TensorBoard's event file for a run that is at a step; None where it is not installed."""
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    return module.SummaryWriter(str(folder), purge_step=step)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _unwritable(path: Path | None, error: OSError) -> UsageError:
    return UsageError(f"--out: {path} cannot be written: {error.strerror}")


def _earlier_records(path: Path, steps: int) -> list[dict[str, Any]]:
    """Return the records up to step `steps`; the last line of a killed process may be cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    kinds = ("run", "step", "epoch")
    return [r for r in records if r["kind"] in kinds and r.get("step", 0) <= steps]


def require_extras() -> None:
    """Make sure that what the report needs is installed.

    Raises:
        UsageError: a package is missing.
    """
    for module, package in _NEEDED.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"{package} is not installed, which the training tool needs: "
                "pip install scatterpar[train]"
            ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
