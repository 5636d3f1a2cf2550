"""A whole run: set up, train epoch by epoch, and report what was reached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scatterpar.train import data as data_sources
from scatterpar.train.check import check_gradients
from scatterpar.train.checkpoint import FILE, Progress, find, restore
from scatterpar.train.device_choice import choose_devices
from scatterpar.train.ending import finish
from scatterpar.train.epochs import Run
from scatterpar.train.errors import UsageError
from scatterpar.train.feed import Feed
from scatterpar.train.loop import Training
from scatterpar.train.machines import (
    Machines,
    connected,
    require_one_process,
    run_id,
    was_restarted,
)
from scatterpar.train.opening import open_data
from scatterpar.train.options import Options
from scatterpar.train.preparation import hire_engine, make_feed, make_model, prepare
from scatterpar.train.provenance import provenance, record
from scatterpar.train.random_state import seed_all
from scatterpar.train.records import Metrics, open_board, require_extras
from scatterpar.train.source import TRAIN, Source


def run(options: Options) -> int:
    """Train as the options say; return the exit code: 0, 1 for a failed check or diverged
    training, 130 when interrupted.

    Raises:
        UsageError: the options do not go together, or name what is not there.
    """
    require_extras()
    devices = choose_devices(options.devices, options.replicas)
    require_one_process(devices)
    source = open_data(options.data, options.reading)
    with connected() as machines:
        return _run_on(machines, options, devices, source)


def _run_on(
    machines: Machines, options: Options, devices: list[torch.device], source: Source
) -> int:
    seed_all(options.seed)
    model, lines = make_model(options, source)
    engine = hire_engine(model, options, devices, machines)
    with engine:
        training = prepare(engine, model, source, options, machines)
        progress = _resume(training, options)
        path = options.out / "metrics.jsonl" if machines.is_first else None
        with (
            Metrics(path, kept=progress.step) as metrics,
            make_feed(training, source, options, progress) as feed,
        ):
            if machines.is_first:
                metrics.board = open_board(options.out, progress.step)
                _announce(training, source, options, progress, lines)
                record(options.out / "run.json", provenance(options.record(), devices))
            if not metrics.records:
                metrics.write("run", machines=machines.size, **options.record())
            criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
            if options.check and not _check(training, source, criterion, options, devices):
                return 1
            about = _about(options, source)
            run = Run(training, feed, criterion, options, progress, metrics, about)
            code, ending = run.train()
            finish(run, ending)
            return code


def _about(options: Options, source: Source) -> dict[str, Any]:
    """What `predict` needs to know."""
    return {
        "model": options.model,
        "image_shape": list(source.image_shape),
        "class_names": list(source.class_names),
        "mean": source.mean.tolist(),
        "std": source.std.tolist(),
    }


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


def _announce(
    training: Training, source: Source, options: Options, progress: Progress, lines: list[str]
) -> None:
    print(source)
    if options.data == data_sources.EMBEDDED and data_sources.INSTALLED.is_dir():
        print(
            f"(all of Fashion-MNIST is installed in {data_sources.INSTALLED}: "
            f"--data {data_sources.INSTALLED_NAME} trains on it)"
        )
    parameters = sum(parameter.numel() for parameter in training.engine.parameters())
    print(f"{options.model}: {parameters:,} parameters")
    machines, rows = training.machines, training.batches.batch
    if machines.size > 1:
        print(f"{machines.size} machines; the first one's part of a batch of {rows:,}:")
    print(training.engine.plan(-(-rows // machines.size)), flush=True)
    if progress.step:
        print(f"resumed after {progress.step} steps, {training.batches.consumed:,} images")
        return
    if training.growth is not None:
        most = training.growth.sizes[-1]
        lines = [*lines, f"the batch follows the gradient's noise scale, up to {most:,} images"]
    elif options.batch != rows:
        told = f"--batch {options.batch} is more than the {rows:,} images to train on"
        lines = [*lines, f"{told}: each step takes all of them, and the learning rate is theirs"]
    if lines:
        print(*lines, sep="\n", flush=True)


def _check(
    training: Training,
    source: Source,
    criterion: nn.Module,
    options: Options,
    devices: list[torch.device],
) -> bool:
    rows = training.batches.order(0)[: training.batches.batch]
    if training.machines.is_first:
        print(f"checking the gradients of the first {len(rows):,} images ...", flush=True)
    found = Feed(source).batch(TRAIN, rows)
    cut = (options.accum, options.micro_batch_size, devices)
    model, machines = training.engine.module, training.machines
    check = check_gradients(model, found.images, found.labels, criterion, *cut, machines)
    if machines.is_first:
        print(check)
    return check.passed
