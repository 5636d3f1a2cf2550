"""The parts of a run, made as the options say: model, engine, optimizer and schedule, feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, linear_scaled_lr, zero_init_residual
from scatterpar.train.check import make_engine
from scatterpar.train.checkpoint import Progress
from scatterpar.train.errors import UsageError
from scatterpar.train.feed import Feed, Request, default_workers
from scatterpar.train.growth import FIRST, Growth
from scatterpar.train.loop import Batches, Training
from scatterpar.train.machines import Machines
from scatterpar.train.model_choice import OnPixels, build_model
from scatterpar.train.optimizers import make_optimizer
from scatterpar.train.options import Options
from scatterpar.train.pretrained import initialise
from scatterpar.train.schedule import foresee, make_growing_scheduler, make_scheduler
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
        if options.batch == "auto" and "compares the gradients" in str(error):
            raise UsageError(
                "--batch auto follows the gradient's noise scale, which is measured between "
                "replicas, and there is one: give --replicas 2, or name its device twice, "
                f"--devices {devices[0]},{devices[0]}"
            ) from error
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
    wanted = FIRST if options.batch == "auto" else options.batch
    # A step has no more images than there are, and the rate belongs to those that it has.
    batches = Batches(images, min(wanted, images), options.seed)
    for what, number in (("--batch", wanted), ("the training set", images)):
        if number < machines.size:
            raise UsageError(f"{what} has {number} images, fewer than {machines.size} machines")
    one_row = partial(_rows_too_few_to_normalise, model, engine, images, machines)
    if rows := one_row(batches.batch):
        raise UsageError(
            f"a batch of {rows} rows makes micro-batches of one row, which batch normalisation "
            "cannot train on: choose another --batch, or fewer --accum or --replicas"
        )
    keywords = dict(options.optimizer_options)
    if options.optimizer.lower() == "sgd":
        keywords = {"momentum": options.momentum, "nesterov": options.momentum > 0, **keywords}
    # The schedule of a batch that grows scales the rate of `FIRST` itself.
    rate = linear_scaled_lr(options.base_lr, FIRST if options.batch == "auto" else batches.batch)
    optimizer = make_optimizer(options.optimizer, model, rate, options.weight_decay, keywords)
    dtype = None if options.autocast is None else getattr(torch, options.autocast)
    return Training(
        engine,
        optimizer,
        _scheduler(optimizer, batches, options),
        batches,
        machines,
        scaler=torch.amp.GradScaler(_kind(engine)) if dtype is torch.float16 else None,
        average=None if options.ema is None else _average(model, options.ema),
        autocast=dtype,
        clip=options.clip,
        growth=_growth(images, one_row) if options.batch == "auto" else None,
    )


def _growth(images: int, one_row: Callable[[int], int]) -> Growth:
    return Growth.up_to(images, fits=lambda batch: not one_row(batch))


def _scheduler(optimizer: Optimizer, batches: Batches, options: Options) -> LRScheduler:
    if options.batch == "auto":
        epochs, warmup = options.epochs, options.warmup_epochs
        return make_growing_scheduler(optimizer, batches, epochs, warmup, options.drop_at)
    epoch = batches.steps_per_epoch
    drops = [number * epoch for number in options.drop_at]
    return make_scheduler(optimizer, options.epochs * epoch, options.warmup_epochs * epoch, drops)


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
    pin = torch.accelerator.is_available()
    foreseen = what_comes(training, len(source.test), options, progress)
    return Feed(source, foreseen, workers, pin, options.skip_broken, _warn)


def what_comes(
    training: Training, test_images: int, options: Options, progress: Progress
) -> Iterator[Request]:
    """Foresee what this rank will want from here on, if the batch stays as it is."""
    return foresee(
        training.batches,
        progress.ended,
        options.epochs,
        options.eval_every,
        test_images,
        options.tested_together,
        training.machines,
    )


def _rows_too_few_to_normalise(
    model: nn.Module, engine: ScatterOnceParallel, images: int, machines: Machines, batch: int
) -> int:
    """Return the rows of a batch of an epoch that makes micro-batches of one; 0 if all is well."""
    if not any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules()):
        return 0
    full = min(batch, images)
    for rows in {full, images % batch or full}:
        shares = engine.plan(max(1, rows // machines.size)).shares  # those of the last rank
        if min(stop - start for share in shares for start, stop in share.micro_batches) == 1:
            return rows
    return 0


def _warn(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line)
