"""Checkpoints: written atomically, and complete, so that a resumed run has the same bits."""

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
# Attributes of `Training` with a state dict, or None.
_PARTS = ("average", "optimizer", "scheduler", "scaler", "noise")


@dataclass
class Progress:
    """How far a run has come: numbers that its report needs, beside the state of `Training`."""

    step: int = 0
    ended: int = 0
    loss: float = 0.0
    accuracy: float | None = None
    best: float = -1.0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of writing `path` into a `UsageError` that names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, if a write fails
        words = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageError(f"--out: {path} cannot be written: {words}") from error


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the body ends, after it was written to the disk."""
    aside = path.with_name(path.name + ".part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            if hasattr(os, "O_DIRECTORY"):  # the directory entry, too
                folder = os.open(path.parent, os.O_DIRECTORY)
                os.fsync(folder)
                os.close(folder)
    finally:
        with contextlib.suppress(OSError):  # it exists only after an error
            aside.unlink()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. At any time `path` is the old one or the new one."""
    with written(path) as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; no code in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        words = f"{words_of(error):.200}"
        raise UsageError(f"{path} is not a checkpoint that can be read: {words}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise UsageError(f"{path} is not a checkpoint of this version of the training tool")
    return state


def collect(training: Training, progress: Progress, **more: Any) -> dict[str, Any]:
    """The state that changes while training. All ranks must call it: it has a collective."""
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
    """Write the weights that were tested: with `--ema` the averaged ones."""
    tested: Any = training.average or training.engine
    save(path, {"format": _FORMAT, "model": tested.module.network.state_dict(), **more})


def restore(state: dict[str, Any], training: Training) -> Progress:
    """Load the state that `collect` returned, on any number of ranks."""
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
    """The latest checkpoint of all ranks, or None. After a restart ranks may be on other hosts."""
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
