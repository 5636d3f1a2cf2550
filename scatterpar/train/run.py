"""A whole run: set up, train epoch by epoch, and report what was reached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from scatterpar.engine import ScatterOnceParallel
from scatterpar.recipe import gradual_warmup, linear_scaled_lr, weight_decay_groups
from scatterpar.train import data as data_sources
from scatterpar.train.check import check_gradients, make_engine
from scatterpar.train.checkpoint import FILE, Progress, find, restore
from scatterpar.train.data import Dataset
from scatterpar.train.device_choice import choose_devices
from scatterpar.train.epochs import CRITERION, Run
from scatterpar.train.errors import UsageError
from scatterpar.train.loop import Batches, Training
from scatterpar.train.machines import (
    Machines,
    connected,
    require_one_process,
    run_id,
    was_restarted,
)
from scatterpar.train.model_choice import build_model
from scatterpar.train.options import Options
from scatterpar.train.random_state import seed_all
from scatterpar.train.report import Metrics, require_extras


def run(options: Options) -> int:
    """Train as the options say; return the exit code: 0, 1 for a failed check or diverged
    training, 130 when interrupted.

    Raises:
        UsageError: the options do not go together, or name what is not there.
    """
    require_extras()
    devices = choose_devices(options.devices, options.replicas)
    require_one_process(devices)
    data = data_sources.load(options.data, options.image_size)
    with connected() as machines:
        return _run_on(machines, options, devices, data)


def _run_on(
    machines: Machines, options: Options, devices: list[torch.device], data: Dataset
) -> int:
    seed_all(options.seed)
    model = build_model(options.model, data.image_shape, data.classes).to(devices[0])
    engine = make_engine(model, options.accum, options.micro_batch_size, devices, machines)
    with engine:
        training = _prepare(engine, model, data, options, machines)
        progress = _resume(training, options)
        path = options.out / "metrics.jsonl" if machines.is_first else None
        with Metrics(path, kept=progress.step) as metrics:
            if machines.is_first:
                _announce(training, data, options, progress)
            if options.check and not _check(model, training, data, options, devices):
                return 1
            return Run(training, data, options, progress, metrics).train()


def _resume(training: Training, options: Options) -> Progress:
    """Go on where an earlier attempt stopped, where that is what is wanted."""
    path = options.out / FILE
    state = find(path, training.machines)
    if state is None:
        if options.resume:
            raise UsageError(f"--resume: there is no {path}")
        return Progress()
    if not (options.resume or was_restarted() or _is_same_job(state)):
        raise UsageError(f"there is a {path}: --resume goes on from it, another --out starts anew")
    wanted = options.settings()
    for name, saved in state["settings"].items():
        if wanted[name] != saved:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{path} is of a run with {option} {saved}, not {wanted[name]}")
    return restore(state, training)


def _is_same_job(state: dict[str, Any]) -> bool:
    return run_id() is not None and state["job"] == run_id()


def _prepare(
    engine: ScatterOnceParallel,
    model: nn.Module,
    data: Dataset,
    options: Options,
    machines: Machines,
) -> Training:
    for what, images in (("--batch", options.batch), ("the training set", len(data.train))):
        if images < machines.size:
            raise UsageError(f"{what} has {images} images, fewer than {machines.size} machines")
    batches = Batches(len(data.train), options.batch, options.seed)
    _require_rows_to_normalise(model, engine, batches, machines)
    peak = linear_scaled_lr(options.base_lr, options.batch)
    optimizer = torch.optim.SGD(
        weight_decay_groups(model, options.weight_decay),
        lr=peak,
        momentum=options.momentum,
        nesterov=options.momentum > 0,
    )
    warmup = options.warmup_epochs * batches.steps_per_epoch
    rest = CosineAnnealingLR(optimizer, options.epochs * batches.steps_per_epoch - warmup)
    scheduler = gradual_warmup(optimizer, warmup, peak / (warmup + 1), rest) if warmup else rest
    return Training(engine, optimizer, scheduler, batches, machines)


def _require_rows_to_normalise(
    model: nn.Module, engine: ScatterOnceParallel, batches: Batches, machines: Machines
) -> None:
    if not any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules()):
        return
    full = min(batches.batch, batches.rows)
    for rows in {full, batches.rows % batches.batch or full}:
        shares = engine.plan(max(1, rows // machines.size)).shares  # those of the last rank
        if min(stop - start for share in shares for start, stop in share.micro_batches) == 1:
            raise UsageError(
                f"a batch of {rows} rows makes micro-batches of one row, which batch normalisation "
                "cannot train on: choose another --batch, or fewer --accum or --replicas"
            )


def _announce(training: Training, data: Dataset, options: Options, progress: Progress) -> None:
    print(data)
    if options.data == data_sources.EMBEDDED and data_sources.INSTALLED.is_dir():
        print(
            f"(all of Fashion-MNIST is installed in {data_sources.INSTALLED}: "
            f"--data {data_sources.INSTALLED_NAME} trains on it)"
        )
    parameters = sum(parameter.numel() for parameter in training.engine.parameters())
    print(f"{options.model}: {parameters:,} parameters")
    machines, rows = training.machines, min(options.batch, len(data.train))
    if machines.size > 1:
        print(f"{machines.size} machines; the first one's part of a batch of {rows:,}:")
    print(training.engine.plan(-(-rows // machines.size)), flush=True)
    if progress.step:
        print(f"resumed after {progress.step} steps, {training.batches.consumed:,} images")


def _check(
    model: nn.Module,
    training: Training,
    data: Dataset,
    options: Options,
    devices: list[torch.device],
) -> bool:
    rows = training.batches.order(0)[: options.batch]
    images, labels = data.standardise(data.train.images[rows]), data.train.labels[rows]
    cut = (options.accum, options.micro_batch_size, devices)
    check = check_gradients(model, images, labels, CRITERION, *cut, training.machines)
    if training.machines.is_first:
        print(check)
    return check.passed
