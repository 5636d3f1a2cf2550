"""The training loop, its state, evaluation, learning rate and batch size.

While the batch is below the gradient's noise scale, twice the batch needs nearly half the steps
(McCandlish et al. 2018, arXiv:1812.06162), and the scale rises in the course of training. So with
`--batch auto` it is doubled between epochs (Smith et al. 2018, arXiv:1711.00489). The learning rate
is scaled with it (Goyal et al. 2017, arXiv:1706.02677, section 2.1). It is a function of the images
that were used; schedulers of libraries count steps or epochs.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, ShardedOptimizer, StepReport, weight_decay_groups
from scatterpar.recipe import NoiseScale
from scatterpar.train.data import TEST, TRAIN, Images, Source, UsageError, words_of
from scatterpar.train.feed import Feed, Request
from scatterpar.train.machines import Machines, seed_of
from scatterpar.train.models import OnPixels, build_model, initialise
from scatterpar.train.options import LARGE_BATCH, Options
from scatterpar.train.pictures import library

FIRST = 256  # images; `--base-lr` is the rate for them
FEWEST_UPDATES = 8  # per epoch; with fewer, training has too few updates
_DEFAULT_UPDATES = 50  # per epoch, at least, with the default batch
_FEWEST_AVERAGED = 20
_WORST = 24  # mistakes that are shown
_IGNORED_LABEL = -100  # the `ignore_index` of torch's own losses


@dataclass
class Batches:
    """The order in which training rows are used, and the position in it.

    Each epoch is a new random order of all rows, which depends only on `seed` and the number of the
    epoch. Its last batch has the remaining rows. The position is `consumed`, the number of samples
    used so far: after a batch was used, its rows are added. Between epochs `batch` may change.
    """

    rows: int
    batch: int
    seed: int
    consumed: int = 0

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.consumed // self.rows

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch, including a smaller last one."""
        return -(-self.rows // self.batch)

    def rest_of_epoch(self) -> Iterator[Tensor]:
        """Yield the row numbers of each batch from here to the end of the epoch: int64."""
        position = self.consumed % self.rows
        yield from torch.split(self.order(self.epoch)[position:], self.batch)

    def order(self, epoch: int) -> Tensor:
        """Return the order of an epoch's rows: int64, shape (rows,)."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        return torch.randperm(self.rows, generator=generator)


@dataclass(frozen=True)
class Training:
    """Everything that changes while training."""

    engine: ScatterOnceParallel
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: Batches
    machines: Machines = field(default_factory=Machines)
    scaler: GradScaler = field(default_factory=partial(GradScaler, enabled=False))
    average: AveragedModel | None = None
    autocast: torch.dtype | None = None
    clip: float | None = None
    noise: NoiseScale | None = None
    growth: Growth | None = None

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """In the body, autocast to the dtype `autocast`, if there is one."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.engine.device_ids[0].type, self.autocast)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """In the body, the model has the averaged weights and buffers, if there are any."""
        model = self.engine.module
        if self.average is None:
            yield
            return
        saved = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.average.module.state_dict())
        try:
            yield
        finally:
            model.load_state_dict(saved)

    def grow(self) -> bool:
        """Use a larger batch from now on if the noise scale has reached one. Returns whether."""
        if self.growth is None or self.noise is None:
            return False
        before, batches = self.batches.batch, self.batches
        batches.batch = self.growth.after(before, self.noise.scale)
        if batches.batch > before:
            self.noise.decay = averaging(batches.steps_per_epoch)
            self.scheduler.step()  # its rate is scaled with the batch
        return batches.batch > before


def train_epoch(
    training: Training, feed: Feed, criterion: nn.Module
) -> Iterator[tuple[StepReport, float]]:
    """Train to the end of the epoch. Yields the report and learning rate of each step."""
    batches, epoch = training.batches, training.batches.epoch
    training.engine.train()
    while batches.epoch == epoch:
        request, batch = feed.take()
        images, labels = batch.images, batch.labels
        if not len(labels):
            # Every rank takes part in every step. A rank without images (fewer rows than ranks, or
            # only broken ones) passes a black image with a label that the criterion ignores.
            images = torch.zeros(1, *feed.source.image_shape, dtype=torch.uint8)
            labels = torch.tensor([_IGNORED_LABEL])
        training.optimizer.zero_grad()
        with training.precision():
            training.engine.forward_backward(images, labels, criterion, scaler=training.scaler)
        _update(training)
        rate = training.optimizer.param_groups[0]["lr"]
        batches.consumed += request.rows_of_all_ranks
        training.scheduler.step()
        report = training.engine.last_step
        assert report is not None, "a step was made"
        if training.noise is not None:
            training.noise.update(report)
        yield report, rate


def _update(training: Training) -> None:
    """Clip gradients, take the optimizer's step, and update scaler and average."""
    optimizer, scaler, model = training.optimizer, training.scaler, training.engine.module
    if training.clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
    scaler.step(optimizer)
    scaler.update()
    if training.average is not None:
        training.average.update_parameters(model)


class Mistake(NamedTuple):
    """A misclassified test image."""

    loss: float
    row: int
    label: int
    predicted: int


@dataclass(frozen=True)
class Evaluation:
    """The results on the test images. The mistakes with the highest loss come first."""

    images: int
    loss: float
    top1: float
    top5: float
    confusion: Tensor
    worst: list[Mistake]


def scored(engine: ScatterOnceParallel, feed: Feed, rows: int) -> Iterator[tuple[Images, Tensor]]:
    """Yield the readable images of the next ``rows`` rows, batch by batch, with their scores."""
    while rows:
        request, batch = feed.take()
        rows -= len(request.rows)
        if len(batch.labels):
            yield batch, engine(batch.images).float().cpu()[:, : len(feed.source.class_names)]


@torch.no_grad()
def evaluate(
    training: Training, feed: Feed, between: Callable[[], None] = lambda: None
) -> Evaluation:
    """Test the model, with the averaged weights if there are any. Each rank tests a part.

    The next requests of `feed` must be this rank's test images. `between` is called after each
    batch.
    """
    classes, machines, engine = len(feed.source.class_names), training.machines, training.engine
    tables = [torch.empty(0, 5, dtype=torch.float64)]
    engine.eval()
    rows = len(machines.share(torch.arange(len(feed.source.test))))
    with training.averaged(), training.precision():
        for batch, scores in scored(engine, feed, rows):
            losses = F.cross_entropy(scores, batch.labels, reduction="none")
            best = scores.topk(min(5, classes)).indices
            is_in_top5 = (best == batch.labels[:, None]).any(1)
            columns = losses.double(), batch.rows, batch.labels, best[:, 0], is_in_top5
            tables.append(torch.stack(columns, 1))
            between()
    table = torch.cat([*chain(*machines.everyones(tables))])
    table = table[table[:, 1].argsort()]
    labels, predicted = table[:, 2].long(), table[:, 3].long()
    pairs = (labels * classes + predicted).bincount(minlength=classes**2)
    wrong = table[labels != predicted]
    wrong = wrong[wrong[:, 0].argsort(descending=True, stable=True)[:_WORST]]
    images = max(1, len(table))
    return Evaluation(
        images=len(table),
        loss=float(table[:, 0].sum()) / images,
        top1=int((labels == predicted).sum()) / images,
        top5=int(table[:, 4].sum()) / images,
        confusion=pairs.view(classes, classes),
        worst=[Mistake(m[0], *map(int, m[1:4])) for m in wrong.tolist()],
    )


def foresee(
    batches: Batches, tested: int, epochs: int, tests: int, test_batch: int, machines: Machines
) -> Iterator[Request]:
    """Yield this rank's requests, in order, from the position of `batches` to the end of the run.

    Args:
        batches: the order of the training rows, and the position.
        tested: the number of epochs after which the model was tested.
        epochs: the number of epochs of the run.
        tests: the number of test images.
        test_batch: how many of them are tested at once, over all ranks.
        machines: the ranks.
    """
    ahead = copy.copy(batches)
    while True:
        epoch = ahead.epoch
        if tested < epoch:
            for rows in machines.share(torch.arange(tests)).split(-(-test_batch // machines.size)):
                if len(rows):
                    yield Request(TEST, rows)
        tested = epoch
        if epoch >= epochs:
            return
        for rows in ahead.rest_of_epoch():
            yield Request(TRAIN, machines.share(rows), epoch, len(rows))
            ahead.consumed += len(rows)


def make_scheduler(
    optimizer: Optimizer, batches: Batches, epochs: int, warmup: int, drops: Sequence[int] = ()
) -> LRScheduler:
    """A gradual warm-up, then a cosine to zero, or drops to a tenth; scaled with the batch.

    The rate depends on the position of `batches`, not on how often the scheduler was stepped.
    """

    def factor(_: int) -> float:
        scale, done = batches.batch / FIRST, batches.consumed / batches.rows
        if done < warmup:
            step = batches.batch / batches.rows
            return scale * (done + step) / (warmup + step)
        if drops:
            return scale * 0.1 ** sum(done >= drop for drop in drops)
        part = (done - warmup) / (epochs - warmup)
        return scale * 0.5 * (1 + math.cos(math.pi * part))

    return LambdaLR(optimizer, factor)


def averaging(steps_per_epoch: int) -> float:
    """Return the decay of a `NoiseScale` that averages over an epoch, or 20 steps if that is more.

    A single step is a poor estimate as long as the batch is much smaller than the noise scale.
    """
    return 1 - 1 / max(_FEWEST_AVERAGED, steps_per_epoch)


@dataclass(frozen=True)
class Growth:
    """The sizes that a batch may have, in ascending order, and the rule for the next one."""

    sizes: tuple[int, ...]

    @classmethod
    def up_to(cls, images: int, fits: Callable[[int], bool] = lambda batch: True) -> Growth:
        """Double `FIRST` while an epoch has `FEWEST_UPDATES`, and keep the sizes that fit."""
        doubled = [min(FIRST, images)]
        while 2 * doubled[-1] * FEWEST_UPDATES <= images:
            doubled.append(2 * doubled[-1])
        return cls((doubled[0], *filter(fits, doubled[1:])))

    def after(self, batch: int, scale: float) -> int:
        """Return the next size if the noise scale, in images, reaches it; else the same."""
        larger = next((size for size in self.sizes if size > batch), batch)
        return larger if larger <= scale < math.inf else batch


def default_batch(images: int, too_few: Callable[[int], int] = lambda batch: 0) -> int:
    """Return the largest power of two, up to 4096, that leaves an epoch `_DEFAULT_UPDATES` steps.

    If some normalisation would have `too_few` rows, return the nearest number with enough rows.
    """
    largest = min(LARGE_BATCH, max(1, images // _DEFAULT_UPDATES))
    batch = 1 << (largest.bit_length() - 1)
    near = sorted(range(1, min(images, 4 * batch) + 1), key=lambda number: abs(number - batch))
    return next((number for number in near if not too_few(number)), batch)


def make_engine(
    options: Options, source: Source, devices: list[torch.device], machines: Machines
) -> ScatterOnceParallel:
    """Build the model with its initial weights, on the first device, and its engine."""
    classes = len(source.class_names)
    about = source.image_shape, classes, source.mean, source.std
    model = build_model(options.model, *about, pretrained=options.pretrained)
    if options.init is not None:
        initialise(model.network, options.init)
    layout = torch.channels_last if options.channels_last else torch.preserve_format
    if options.measure_noise and len(devices) * machines.size < 2:
        raise UsageError(
            "--batch auto and --measure-noise compare the gradients of replicas, and there is one: "
            f"name its device twice, --devices {devices[0]},{devices[0]}"
        )
    try:
        return ScatterOnceParallel(
            model.to(devices[0], memory_format=layout),  # type: ignore[call-overload]
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
        raise UsageError(str(error)) from error


def prepare(
    engine: ScatterOnceParallel, source: Source, options: Options, machines: Machines
) -> Training:
    """Make the state of training at the start of a run."""
    images, model, grows = len(source.train), engine.module, options.batch == "auto"
    too_few = partial(_too_few_to_normalise, engine, images, machines)
    size = FIRST if options.batch == "auto" else options.batch
    # A step has at most all images, and the learning rate is scaled for those that it has.
    batch = default_batch(images, too_few) if size is None else min(size, images)
    batches = Batches(images, batch, options.seed)
    if rows := too_few(batches.batch):
        raise UsageError(
            f"a batch of {rows} rows makes micro-batches of one row, which batch normalisation "
            "cannot train on: choose another --batch, or fewer --accum or --devices"
        )
    optimizer = plain = make_optimizer(model, options)
    if options.shard_optimizer:
        optimizer = ShardedOptimizer(engine, lambda _: plain)
    warmup, average, noise = options.warmup_epochs or 0, None, None
    if options.ema is not None:
        function = get_ema_multi_avg_fn(options.ema)
        average = AveragedModel(model, multi_avg_fn=function, use_buffers=True)
    if options.measure_noise:
        noise = NoiseScale(averaging(batches.steps_per_epoch))
    return Training(
        engine,
        optimizer,
        make_scheduler(optimizer, batches, options.epochs, warmup, options.drop_at),
        batches,
        machines,
        GradScaler(engine.device_ids[0].type, enabled=options.autocast == "float16"),
        average,
        autocast=getattr(torch, options.autocast) if options.autocast else None,
        clip=options.clip,
        noise=noise,
        growth=Growth.up_to(images, lambda batch: not too_few(batch)) if grows else None,
    )


def make_optimizer(model: nn.Module, options: Options) -> Optimizer:
    """Build torch's optimizer of a name, or timm's; biases and norms have no weight decay."""
    name, decay = options.optimizer.lower(), options.weight_decay
    known = {kind.lower(): x for kind, x in vars(torch.optim).items() if isinstance(x, type)}
    keywords: dict[str, Any] = {"lr": options.base_lr}
    if name == "sgd":
        keywords |= {"momentum": options.momentum, "nesterov": options.momentum > 0}
    try:
        if name in known and options.layer_decay is None:
            return known[name](weight_decay_groups(model, decay), **keywords)  # type: ignore[no-any-return]
        keywords |= {"weight_decay": decay, "layer_decay": options.layer_decay}
        network = model.network if isinstance(model, OnPixels) else model
        made: Optimizer = library("timm.optim").create_optimizer_v2(network, name, **keywords)
    except (UsageError, AssertionError, TypeError, ValueError) as error:
        raise UsageError(
            f"--optimizer {options.optimizer}: {words_of(error)} (it is a class of torch.optim, or "
            "one of timm's names)"
        ) from error
    for group in made.param_groups:
        group["lr"] *= group.pop("lr_scale", 1.0)  # as timm's schedulers do
    return made


def _too_few_to_normalise(
    engine: ScatterOnceParallel, images: int, machines: Machines, batch: int
) -> int:
    """Return the size of an epoch's batch that has a micro-batch of one row; 0 if there is none."""
    if not any(isinstance(layer, nn.BatchNorm1d) for layer in engine.module.modules()):
        return 0
    for rows in {min(batch, images), images % batch} - {0}:
        shares = engine.plan(max(1, rows // machines.size)).shares  # those of the last rank
        if any(stop - start == 1 for share in shares for start, stop in share.micro_batches):
            return rows
    return 0
