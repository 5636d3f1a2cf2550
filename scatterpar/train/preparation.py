"""The parts of a run, made as the options say: model, engine, optimizer and schedule, feed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, linear_scaled_lr, zero_init_residual
from scatterpar.train.check import make_engine
from scatterpar.train.checkpoint import Progress
from scatterpar.train.errors import UsageError
from scatterpar.train.feed import Feed, default_workers
from scatterpar.train.loop import Batches, Training
from scatterpar.train.machines import Machines
from scatterpar.train.model_choice import OnPixels, build_model
from scatterpar.train.optimizers import make_optimizer
from scatterpar.train.options import Options
from scatterpar.train.pretrained import initialise
from scatterpar.train.schedule import foresee, make_scheduler
from scatterpar.train.source import Source


def make_model(options: Options, source: Source) -> tuple[OnPixels, list[str]]:
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


def hire_engine(
    model: OnPixels, options: Options, devices: list[torch.device], machines: Machines
) -> ScatterOnceParallel:
    """Bring the model to the first device, and build the engine for it.

    Raises:
        UsageError: the options do not go together.
    """
    layout = torch.channels_last if options.channels_last else torch.preserve_format
    model = model.to(devices[0], memory_format=layout)  # type: ignore[call-overload]
    keywords: dict[str, Any] = {
        "shares": options.shares,
        "measure_noise": options.measure_noise,
        "compile": options.compile or None,
    }
    cut = (options.accum, options.micro_batch_size, devices)
    try:
        return make_engine(model, *cut, machines, **keywords)
    except ValueError as error:
        raise UsageError(str(error)) from error


def prepare(
    engine: ScatterOnceParallel,
    model: OnPixels,
    source: Source,
    options: Options,
    machines: Machines,
) -> Training:
    """Make what changes while training, at its start.

    Raises:
        UsageError: the options do not go together.
    """
    images = len(source.train)
    for what, number in (("--batch", options.batch), ("the training set", images)):
        if number < machines.size:
            raise UsageError(f"{what} has {number} images, fewer than {machines.size} machines")
    batches = Batches(images, options.batch, options.seed)
    _require_rows_to_normalise(model, engine, batches, machines)
    keywords = dict(options.optimizer_options)
    if options.optimizer.lower() == "sgd":
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


def make_feed(training: Training, source: Source, options: Options, progress: Progress) -> Feed:
    """Start what reads the images, from where the run is."""
    workers = options.workers
    if source.in_memory:
        workers = 0
    elif workers is None:
        workers = default_workers()
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


def _warn(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line)
