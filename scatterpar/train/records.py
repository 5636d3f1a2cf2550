"""What a run writes about itself: lines of JSON, TensorBoard's file, what made it, and curves."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from scatterpar.train.errors import UsageError

_PACKAGES = ("scatterpar", "torch", "torchvision", "timm", "numpy", "pillow")
Records = list[dict[str, Any]]


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
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + ".part")
            aside.write_text("".join(map(_line, self.records)), encoding="utf-8")
            os.replace(aside, path)
            self._file = path.open("a", encoding="utf-8")

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
        if self._file is not None and self._path is not None:
            with writing(self._path):
                self._file.write(_line(record))
                self._file.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file of --out could not be written.

    Raises:
        UsageError: the system has refused.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror}") from error


def _earlier_records(path: Path, steps: int) -> list[dict[str, Any]]:
    """Return the records up to step `steps`; the last line of a killed process may be cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    kinds = ("run", "step", "epoch")
    return [r for r in records if r["kind"] in kinds and r.get("step", 0) <= steps]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value


def provenance(options: dict[str, Any], devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return options, versions, devices and the commit of the folder that the run started in."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "options": options,
        "versions": {"python": platform.python_version(), **_versions()},
        "system": platform.platform(),
        "devices": [_device(device) for device in devices],
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain") or "").splitlines(),
    }


def record(path: Path, values: dict[str, Any]) -> None:
    """Append to a list in a JSON file: a run that is resumed has several starts.

    Raises:
        UsageError: it cannot be written.
    """
    earlier: list[Any] = []
    with contextlib.suppress(OSError, json.JSONDecodeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
    aside = path.with_name(path.name + ".part")
    with writing(path):
        aside.write_text(json.dumps([*earlier, values], indent=2, default=str), encoding="utf-8")
        os.replace(aside, path)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device}: {torch.cuda.get_device_name(device)}"


def _git(*arguments: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()
    return None


def draw_curves(records: Records, path: Path) -> None:
    """Draw loss and accuracy, and the noise scale if it was measured, from `Metrics.records`."""
    from matplotlib.figure import Figure

    steps = [record for record in records if record["kind"] == "step"]
    tested = [r for r in records if r["kind"] == "epoch" and r["test_loss"] is not None]
    measured = [r for r in steps if r.get("noise_scale") is not None]
    figure = Figure(figsize=(13.5 if measured else 9, 3.6))
    loss, accuracy, *noise = figure.subplots(1, 2 + bool(measured))
    _draw_loss(loss, steps, tested)
    accuracy.plot([r["epoch"] for r in tested], [100 * r["test_accuracy"] for r in tested], "o-")
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    if noise:
        _draw_noise(noise[0], measured)
    for axes in (loss, accuracy, *noise):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_loss(axes: Any, steps: Records, tested: Records) -> None:
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], label="training, each step")
    numbers, losses = [r["step"] for r in tested], [r["test_loss"] for r in tested]
    axes.plot(numbers, losses, "o-", label="test, each epoch")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()


def _draw_noise(axes: Any, steps: Records) -> None:
    numbers = [r["step"] for r in steps]
    axes.plot(numbers, [r["noise_scale"] for r in steps], label="noise scale of the gradient")
    axes.plot(numbers, [r["images"] for r in steps], label="batch")
    axes.set(xlabel="step", ylabel="images", yscale="log")
    axes.legend()
