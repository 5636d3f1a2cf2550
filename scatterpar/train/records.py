"""The records of a run (lines of JSON, and two loggers), its versions, and curves."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from scatterpar.train.checkpoint import writing, written
from scatterpar.train.data import UsageError, words_of

_PACKAGES = ("scatterpar", "torch", "torchvision", "timm", "numpy", "pillow")
Records = list[dict[str, Any]]


class Metrics:
    """Records in a file, one JSON object per line, each with its `"kind"`, and in memory.

    Records of steps and epochs are also written to TensorBoard's event file, if that is installed,
    and to a project of Weights & Biases, if one is given. Without a path there is no file. The
    records of the first `earlier_steps` steps of earlier sessions stay in the file.
    """

    def __init__(self, path: Path | None, earlier_steps: int = 0, wandb: str | None = None) -> None:
        self.records: Records = []
        self._file: TextIO | None = None
        self._board: Any = None
        self._wandb: Any = None
        if path is None:
            return
        self.records = _earlier_records(path, earlier_steps) if earlier_steps else []
        with written(path) as file:
            file.write("".join(map(_line, self.records)).encode())
        if wandb is not None:
            self._wandb = _wandb_run(wandb, path.parent)
        self._file = path.open("a", encoding="utf-8")
        with contextlib.suppress(ImportError):
            module = importlib.import_module("torch.utils.tensorboard")
            self._board = module.SummaryWriter(str(path.parent), purge_step=earlier_steps)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record; NaN and infinities, which JSON lacks, become null."""
        text = json.dumps({"kind": kind, **fields})
        record = json.loads(text, parse_constant=lambda _: None)
        self.records.append(record)
        if self._file is not None:
            with writing(Path(self._file.name)):
                self._file.write(_line(record))
                self._file.flush()
        if self._wandb is not None and kind == "run":
            self._wandb.config.update(record, allow_val_change=True)
        if kind not in ("step", "epoch"):
            return
        numbers = {f"{kind}/{n}": value for n, value in record.items() if isinstance(value, float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log({**numbers, "step": record["step"]})

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported before
            for file in (self._file, self._board):
                if file is not None:
                    file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _wandb_run(project: str, folder: Path) -> Any:
    """Start a run of Weights & Biases, grouped with earlier sessions in the same folder."""
    try:
        wandb = importlib.import_module("wandb")
        run = wandb.init(project=project, dir=folder, group=folder.name)
    except Exception as error:
        hint = "pip install wandb; WANDB_MODE=offline needs no account"
        raise UsageError(f"--wandb {project}: {words_of(error)} ({hint})") from error
    run.define_metric("*", step_metric="step")
    return run


def of_kind(kind: str, records: Records) -> Records:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]


def best_epoch(records: Records) -> dict[str, Any] | None:
    """Return the record of the first epoch with the highest test accuracy."""
    return max(of_kind("epoch", records), key=lambda r: float(r["test_accuracy"]), default=None)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _earlier_records(path: Path, steps: int) -> Records:
    """Return the records up to step `steps`. An incomplete last line is ignored."""
    records = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            records.append(json.loads(line))
    return [r for r in records if r["kind"] != "summary" and r["step"] <= steps]


def provenance(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the command, the versions, the devices, and the commit of the current folder."""
    versions, commit = {"python": platform.python_version()}, None
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, encoding="utf-8", timeout=10, check=True)
        commit = done.stdout.strip()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "versions": versions,
        "devices": [
            f"{d}: {torch.cuda.get_device_name(d)}" if d.type == "cuda" else str(d) for d in devices
        ],
        "system": platform.platform(),
        "commit": commit,
    }


def draw_curves(records: Records, path: Path) -> None:
    """Draw loss and accuracy from `Metrics.records`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    steps, tested = of_kind("step", records), of_kind("epoch", records)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for axes, what, x, y, style, label in (
        (loss, steps, "step", "loss", "-", "training loss"),
        (loss, tested, "step", "test_loss", "o-", "test loss"),
        (accuracy, tested, "epoch", "test_accuracy", "o-", "Top-1 accuracy"),
        (accuracy, tested, "epoch", "test_accuracy_top5", "o:", "Top-5 accuracy"),
    ):
        heights = [math.nan if r.get(y) is None else r[y] for r in what]
        axes.plot([r[x] for r in what], heights, style, label=label, markersize=4)
    loss.set(title="Loss", xlabel="Step")
    accuracy.set(title="Test accuracy", xlabel="Epoch")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    if best := best_epoch(records):
        x, y = best["epoch"], best["test_accuracy"]
        accuracy.plot(x, y, "*", markersize=14, label=f"best: {y:.2%}, epoch {x}")
    loss.legend()
    accuracy.legend()
    figure.savefig(path, dpi=120)
