"""The parts of a run, made as the options say: model, engine, optimizer and schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, ShardedOptimizer, weight_decay_groups
from scatterpar.train.data import Source, UsageError, words_of
from scatterpar.train.loop import Batches, Training
from scatterpar.train.machines import Machines
from scatterpar.train.models import OnPixels, build_model, initialise
from scatterpar.train.options import Options
from scatterpar.train.pictures import import_timm
from scatterpar.train.schedule import FIRST, Growth, make_scheduler


def make_model(options: Options, source: Source) -> OnPixels:
    """Build the model with its first weights."""
    classes = len(source.class_names)
    model = build_model(options.model, source.image_shape, classes, source.mean, source.std)
    if options.init is not None:
        initialise(model.network, options.init)
    return model


def hire_engine(
    model: OnPixels, options: Options, devices: list[torch.device], machines: Machines
) -> ScatterOnceParallel:
    """Bring the model to the first device, and build the engine for it.

    Raises:
        UsageError: the options do not go together.
    """
    layout = torch.channels_last if options.channels_last else torch.preserve_format
    model = model.to(devices[0], memory_format=layout)  # type: ignore[call-overload]
    try:
        return ScatterOnceParallel(
            model,
            options.accum or 1,
            devices,
            micro_batch_size=options.micro_batch_size,
            check_finite=True,
            process_group=machines.group,
            shares=options.shares,
            measure_noise=options.measure_noise,
            compile=options.compile or None,
        )
    except ValueError as error:
        if options.batch == "auto" and "compares the gradients" in str(error):
            raise UsageError(
                "--batch auto follows the gradient's noise scale, which is measured between "
                f"replicas, and there is one: name its device twice, --devices {devices[0]},"
                f"{devices[0]}"
            ) from error
        raise UsageError(str(error)) from error


def prepare(
    engine: ScatterOnceParallel,
    model: OnPixels,
    source: Source,
    options: Options,
    machines: Machines,
) -> tuple[Training, Growth | None]:
    """Make what changes while training, at its start, and the sizes of a batch that grows.

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
            "cannot train on: choose another --batch, or fewer --accum or --devices"
        )
    made = make_optimizer(model, options)
    optimizer = ShardedOptimizer(engine, lambda _: made) if options.shard_optimizer else made
    epochs, warmup = options.epochs, options.warmup_epochs or 0
    dtype = None if options.autocast is None else getattr(torch, options.autocast)
    average, kind = None, engine.device_ids[0].type
    if options.ema is not None:
        function = get_ema_multi_avg_fn(options.ema)
        average = AveragedModel(model, multi_avg_fn=function, use_buffers=True)
    training = Training(
        engine,
        optimizer,
        make_scheduler(optimizer, batches, epochs, warmup, options.drop_at),
        batches,
        machines,
        scaler=torch.amp.GradScaler(kind) if dtype is torch.float16 else None,
        average=average,
        autocast=dtype,
        clip=options.clip,
    )
    if options.batch != "auto":
        return training, None
    return training, Growth.up_to(images, fits=lambda batch: not one_row(batch))


def make_optimizer(model: OnPixels, options: Options) -> Optimizer:
    """Build an optimizer for a model, without decay of biases and norms; its rate is for `FIRST`.

    It is torch's where torch has one of that name, in any case; else timm's.

    Raises:
        UsageError: there is no such optimizer, or it does not take the options.
    """
    name, decay = options.optimizer, options.weight_decay
    known = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    keywords: dict[str, Any] = {"lr": options.base_lr}
    if name.lower() == "sgd":
        keywords |= {"momentum": options.momentum, "nesterov": options.momentum > 0}
    try:
        if name.lower() in known and options.layer_decay is None:
            return known[name.lower()](weight_decay_groups(model, decay), **keywords)
        keywords |= {"weight_decay": decay}
        made: Optimizer = import_timm("optim").create_optimizer_v2(
            model.network, name, layer_decay=options.layer_decay, **keywords
        )
    except (UsageError, AssertionError, TypeError, ValueError) as error:
        names = ", ".join(sorted(value.__name__ for value in known.values()))
        raise UsageError(
            f"--optimizer {name}: {words_of(error)} (torch.optim has {names}; timm has more)"
        ) from error
    for group in made.param_groups:
        group["lr"] *= group.pop("lr_scale", 1.0)  # timm's own schedulers would do it
    return made


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
