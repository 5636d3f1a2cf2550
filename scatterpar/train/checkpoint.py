"""Checkpoints: whole or not there, and enough in them to go on bit for bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from scatterpar.train.data import UsageError, words_of
from scatterpar.train.machines import Machines, random_states, set_random_states
from scatterpar.train.training import Training

FILE = "checkpoint.pt"
BEST_FILE = "best.pt"
_FORMAT = 3
_PARTS = ("average", "optimizer", "scheduler", "scaler", "noise")  # of `Training`; may be None


@dataclass
class Progress:
    """What a run has reached: what its report needs beside the training itself."""

    step: int = 0
    ended: int = 0
    loss: float = 0.0
    accuracy: float | None = None
    best: float = -1.0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file of --out could not be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # the latter from torch, where a write fails
        words = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageError(f"--out: {path} cannot be written: {words}") from error


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name once it is whole, on the disk too."""
    aside = path.with_name(path.name + ".part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            if hasattr(os, "O_DIRECTORY"):  # the name itself must be on the disk too
                folder = os.open(path.parent, os.O_DIRECTORY)
                os.fsync(folder)
                os.close(folder)
    finally:
        with contextlib.suppress(OSError):  # there is one after an error alone
            aside.unlink()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint: under `path` there is the old one or the new one."""
    with written(path) as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote; nothing in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        words = f"{words_of(error):.200}"
        raise UsageError(f"{path} is not a checkpoint that can be read: {words}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise UsageError(f"{path} is not a checkpoint of this version of the training tool")
    return state


def collect(training: Training, progress: Progress, **more: Any) -> dict[str, Any]:
    """Everything that changes while training; all ranks call it, as it asks each."""
    parts = ((name, getattr(training, name)) for name in _PARTS)
    return {
        "format": _FORMAT,
        "model": training.engine.module.network.state_dict(),
        **{name: None if part is None else part.state_dict() for name, part in parts},
        "progress": asdict(progress),
        "consumed": training.batches.consumed,
        "batch": training.batches.batch,
        "random": training.machines.everyones(random_states(training.engine.device_ids)),
        **more,
    }


def save_best(path: Path, training: Training, **more: Any) -> None:
    """Write the weights that were tested: the averaged ones, where these are kept."""
    tested: Any = training.average or training.engine
    save(path, {"format": _FORMAT, "model": tested.module.network.state_dict(), **more})


def restore(state: dict[str, Any], training: Training) -> Progress:
    """Continue from what `collect` returned, on as many ranks as before or others."""
    training.engine.module.network.load_state_dict(state["model"])
    for name in _PARTS:
        if getattr(training, name) is not None and state[name] is not None:
            getattr(training, name).load_state_dict(state[name])
    training.batches.consumed = state["consumed"]
    training.batches.batch = state["batch"]
    everyones, rank = state["random"], training.machines.rank
    set_random_states(everyones[rank if rank < len(everyones) else 0])
    return Progress(**state["progress"])


def find(path: Path, machines: Machines) -> dict[str, Any] | None:
    """The checkpoint of the rank that has the latest one: after a restart ranks may move."""
    mine, problem = None, ""
    try:
        mine = load(path) if path.exists() else None
    except UsageError as error:
        problem = str(error)
    told = machines.everyones((-1 if mine is None else mine["consumed"], problem))
    reached, problems = zip(*told, strict=True)
    if problem := next(filter(None, problems), ""):
        raise UsageError(problem)
    state: dict[str, Any] | None = machines.from_rank(reached.index(max(reached)), mine)
    return state
