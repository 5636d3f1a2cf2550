"""Checkpoints: whole or not there, and enough in them to go on bit for bit."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scatterpar.train.data import UsageError, words_of
from scatterpar.train.loop import Training
from scatterpar.train.machines import Machines
from scatterpar.train.models import OnPixels
from scatterpar.train.random_state import random_states, set_random_states

FILE = "checkpoint.pt"
BEST_FILE = "best.pt"
_FORMAT = 2


@dataclass
class Progress:
    """What a run has reached: what its report needs beside the training itself.

    Attributes:
        step: optimizer steps made.
        ended: epochs that are done with, their tests included.
        loss: training loss of the current epoch so far, weighted by images.
        accuracy: on the test images, when last measured.
        best: the highest accuracy so far.
        noise: of the gradients, averaged, where it is measured.
    """

    step: int = 0
    ended: int = 0
    loss: float = 0.0
    accuracy: float | None = None
    best: float = -1.0
    noise: dict[str, float] | None = None


def save(path: Path, state: dict[str, Any]) -> None:
    """Write aside, then rename: under `path` there is the old checkpoint or the new one.

    Raises:
        UsageError: it cannot be written.
    """
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        if hasattr(os, "O_DIRECTORY"):  # the name itself must be on the disk too
            folder = os.open(path.parent, os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)
    except (OSError, RuntimeError) as error:  # the latter from torch, where a write fails
        with contextlib.suppress(OSError):
            aside.unlink()
        words = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageError(f"--out: {path} cannot be written: {words}") from error


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote; nothing in the file is executed.

    Raises:
        UsageError: it is not a checkpoint of this tool.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        words = f"{words_of(error):.200}"
        raise UsageError(f"{path} is not a checkpoint that can be read: {words}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise UsageError(f"{path} is not a checkpoint of this version of the training tool")
    return state


def collect(
    training: Training,
    progress: Progress,
    settings: dict[str, Any],
    job: str | None,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that changes while training; all ranks call it, as it asks each.

    Args:
        training: what is trained, and how far the data has been used.
        progress: what the report needs.
        settings: the options that decide the run; they must be the same when it goes on.
        job: torchrun's name of the run, if any.
        about: what `predict` needs to know of the model.
    """
    parts = _parts(training).items()
    return {
        **_weights(training.engine.module, about),
        **{name: None if part is None else dict(part.state_dict()) for name, part in parts},
        "job": job,
        "settings": settings,
        "progress": asdict(progress),
        "consumed": training.batches.consumed,
        "batch": training.batches.batch,
        "random": training.machines.everyones(random_states(training.engine.device_ids)),
    }


def collect_best(training: Training, accuracy: float, about: dict[str, Any]) -> dict[str, Any]:
    """The weights that were tested (the averaged ones, where these are kept), and no more."""
    average = training.average
    module = training.engine.module if average is None else average.module
    return {**_weights(module, about), "accuracy": accuracy}


def _parts(training: Training) -> dict[str, Any]:
    """What has a state dict of its own, and may not be there."""
    names = ("average", "optimizer", "scheduler", "scaler")
    return {name: getattr(training, name) for name in names}


def _weights(module: nn.Module, about: dict[str, Any] | None) -> dict[str, Any]:
    model = (module.network if isinstance(module, OnPixels) else module).state_dict()
    versions = getattr(model, "_metadata", {})
    return {
        "format": _FORMAT,
        "about": about,
        "model": dict(model),
        "versions": {name: dict(entry) for name, entry in versions.items()},
    }


def load_weights(network: nn.Module, state: dict[str, Any]) -> None:
    """Give a network the weights of a checkpoint, those that a run would test with.

    Raises:
        RuntimeError: they are another network's.
    """
    model = OrderedDict(state["model"])
    if state.get("average") is not None:
        start = "module.network."
        found = {n.removeprefix(start): x for n, x in state["average"].items() if n != "n_averaged"}
        model.update(found)
    model._metadata = state["versions"]  # type: ignore[attr-defined]
    network.load_state_dict(model)


def restore(state: dict[str, Any], training: Training) -> Progress:
    """Continue from what `collect` returned, on as many ranks as before or others."""
    module = training.engine.module
    network = module.network if isinstance(module, OnPixels) else module
    load_weights(network, {**state, "average": None})
    for name, part in _parts(training).items():
        if part is not None and state[name] is not None:
            part.load_state_dict(state[name])
    training.batches.consumed = state["consumed"]
    training.batches.batch = state["batch"]
    everyones, rank = state["random"], training.machines.rank
    set_random_states(everyones[rank if rank < len(everyones) else 0])
    return Progress(**state["progress"])


def find(path: Path, machines: Machines) -> dict[str, Any] | None:
    """The checkpoint of the rank that has the latest one: after a restart ranks may move.

    Raises:
        UsageError: on all ranks, where one has a file that cannot be read.
    """
    mine, here = None, (-1, "")
    if path.exists():
        try:
            mine = load(path)
            here = (mine["consumed"], "")
        except UsageError as error:
            here = (-1, str(error))
    found = machines.everyones(here)
    for _, problem in found:
        if problem:
            raise UsageError(problem)
    latest = [consumed for consumed, _ in found]
    if max(latest) < 0:
        return None
    state: dict[str, Any] = machines.from_rank(latest.index(max(latest)), mine)
    return state
