"""A whole run: set up, train epoch by epoch, and report what was reached."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, linear_scaled_lr, zero_init_residual
from scatterpar.train import data as data_sources
from scatterpar.train.check import check_gradients, make_engine
from scatterpar.train.checkpoint import FILE, Progress, find, restore
from scatterpar.train.device_choice import choose_devices
from scatterpar.train.ending import finish
from scatterpar.train.epochs import Run
from scatterpar.train.errors import UsageError
from scatterpar.train.feed import Feed
from scatterpar.train.loop import Batches, Training
from scatterpar.train.machines import (
    Machines,
    connected,
    require_one_process,
    run_id,
    was_restarted,
)
from scatterpar.train.model_choice import OnPixels, build_model
from scatterpar.train.opening import open_data
from scatterpar.train.optimizers import make_optimizer
from scatterpar.train.options import Options
from scatterpar.train.pretrained import initialise
from scatterpar.train.provenance import provenance, record
from scatterpar.train.random_state import seed_all
from scatterpar.train.records import Metrics, open_board, require_extras
from scatterpar.train.schedule import foresee, make_scheduler
from scatterpar.train.source import TRAIN, Source

_MOST_WORKERS = 16  # by default


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
    model, lines = _make_model(options, source)
    layout = torch.channels_last if options.channels_last else torch.preserve_format
    model = model.to(devices[0], memory_format=layout)  # type: ignore[call-overload]
    keywords: dict[str, Any] = {
        "shares": options.shares,
        "measure_noise": options.measure_noise,
        "compile": options.compile or None,
    }
    cut = (options.accum, options.micro_batch_size, devices)
    try:
        engine = make_engine(model, *cut, machines, **keywords)
    except ValueError as error:  # options that do not go together
        raise UsageError(str(error)) from error
    with engine:
        training = _prepare(engine, model, source, options, machines)
        progress = _resume(training, options)
        path = options.out / "metrics.jsonl" if machines.is_first else None
        board = open_board(options.out, progress.step) if machines.is_first else None
        with (
            Metrics(path, kept=progress.step, board=board) as metrics,
            _make_feed(training, source, options, progress) as feed,
        ):
            if machines.is_first:
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


def _make_model(options: Options, source: Source) -> tuple[OnPixels, list[str]]:
    """Build the model with its first weights, and say what is special about these."""
    classes = len(source.class_names)
    model = build_model(options.model, source.image_shape, classes, source.mean, source.std)
    lines = []
    if options.zero_init_residual:
        blocks = zero_init_residual(model.network)
        if not blocks:
            raise UsageError(f"--zero-init-residual: {options.model} has no residual blocks")
        lines.append(f"{blocks} residual blocks start as the identity")
    if options.init is not None:
        lines.append(initialise(model.network, options.init))
    return model, lines


def _prepare(
    engine: ScatterOnceParallel,
    model: OnPixels,
    source: Source,
    options: Options,
    machines: Machines,
) -> Training:
    images = len(source.train)
    for what, number in (("--batch", options.batch), ("the training set", images)):
        if number < machines.size:
            raise UsageError(f"{what} has {number} images, fewer than {machines.size} machines")
    batches = Batches(images, options.batch, options.seed)
    _require_rows_to_normalise(model, engine, batches, machines)
    keywords = dict(options.optimizer_options)
    if options.optimizer == "SGD":
        keywords = {"momentum": options.momentum, "nesterov": options.momentum > 0, **keywords}
    rate = linear_scaled_lr(options.base_lr, options.batch)
    optimizer = make_optimizer(options.optimizer, model, rate, options.weight_decay, keywords)
    epoch = batches.steps_per_epoch
    scheduler = make_scheduler(
        optimizer,
        options.epochs * epoch,
        options.warmup_epochs * epoch,
        [number * epoch for number in options.drop_at],
    )
    dtype = None if options.autocast is None else getattr(torch, options.autocast)
    return Training(
        engine,
        optimizer,
        scheduler,
        batches,
        machines,
        scaler=torch.amp.GradScaler(_kind(engine)) if dtype is torch.float16 else None,
        average=None if options.ema is None else _average(model, options.ema),
        autocast=dtype,
        clip=options.clip,
    )


def _average(model: nn.Module, decay: float) -> AveragedModel:
    function = get_ema_multi_avg_fn(decay)
    return AveragedModel(model, multi_avg_fn=function, use_buffers=True)


def _kind(engine: ScatterOnceParallel) -> str:
    return str(engine.device_ids[0].type)


def _make_feed(training: Training, source: Source, options: Options, progress: Progress) -> Feed:
    workers = options.workers
    if source.in_memory:
        workers = 0
    elif workers is None:
        workers = min(_MOST_WORKERS, os.cpu_count() or 1)
    foreseen = foresee(
        training.batches,
        progress.ended,
        options.epochs,
        options.eval_every,
        len(source.test),
        training.machines,
    )
    pin = torch.accelerator.is_available()
    return Feed(source, foreseen, workers, pin, options.skip_broken, _warn)


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
    machines, rows = training.machines, min(options.batch, len(source.train))
    if machines.size > 1:
        print(f"{machines.size} machines; the first one's part of a batch of {rows:,}:")
    print(training.engine.plan(-(-rows // machines.size)), flush=True)
    if progress.step:
        print(f"resumed after {progress.step} steps, {training.batches.consumed:,} images")
    else:
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)


def _check(
    training: Training,
    source: Source,
    criterion: nn.Module,
    options: Options,
    devices: list[torch.device],
) -> bool:
    rows = training.batches.order(0)[: options.batch]
    found = Feed(source).batch(TRAIN, rows)
    cut = (options.accum, options.micro_batch_size, devices)
    model, machines = training.engine.module, training.machines
    check = check_gradients(model, found.images, found.labels, criterion, *cut, machines)
    if machines.is_first:
        print(check)
    return check.passed


def _warn(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line)
