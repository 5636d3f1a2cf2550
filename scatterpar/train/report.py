"""What a run leaves behind: a file of metrics and a picture of the curves."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from scatterpar.train.errors import UsageError


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
        self._file: TextIO | None = None
        if path is None:
            return
        earlier = _earlier_records(path, kept) if kept else []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out: {path} cannot be written: {error.strerror}") from error
        for record in earlier:
            self._append(record)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record."""
        record = {"kind": kind, **{name: _plain(value) for name, value in fields.items()}}
        self._append(record)

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def _earlier_records(path: Path, steps: int) -> list[dict[str, Any]]:
    """Return the records up to step `steps`; the last line of a killed process may be cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    kinds = ("run", "step", "epoch")
    return [r for r in records if r["kind"] in kinds and r.get("step", 0) <= steps]


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss by step and the test accuracy by epoch, from `Metrics.records`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6))
    loss, accuracy = figure.subplots(1, 2)
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    loss.plot([r["step"] for r in steps], [r["loss"] for r in steps], label="training, each step")
    loss.plot(
        [r["step"] for r in epochs],
        [r["test_loss"] for r in epochs],
        "o-",
        label="test, each epoch",
    )
    loss.set(xlabel="step", ylabel="loss")
    loss.legend()
    accuracy.plot([r["epoch"] for r in epochs], [100 * r["test_accuracy"] for r in epochs], "o-")
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def require_extras() -> None:
    """Make sure that what the report needs is installed.

    Raises:
        UsageError: a package is missing.
    """
    for package in ("matplotlib", "tqdm"):
        try:
            importlib.import_module(package)
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
