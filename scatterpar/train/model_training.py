"""The model and its training: one step, the test, and the learning rate.

The order of the images, the random numbers of a step and its learning rate are
functions of the seed and of the number of images used so far. So a resumed run has the
same bits.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel, StepReport, weight_decay_groups
from scatterpar.devices.device_ids import parse_devices, resolve
from scatterpar.train.command_line import (
    EMBEDDED,
    LARGE_BATCH,
    Options,
    UsageError,
    words_of,
)
from scatterpar.train.data import BatchRequest, Images, Source, seed_host, seed_of
from scatterpar.train.data_parts import TEST, TRAIN
from scatterpar.train.feed import Feed, FeedError
from scatterpar.train.libraries import library, suggestion
from scatterpar.train.models import (
    BUILT_IN,
    OnPixels,
    build_model,
    has_library_weights,
    head_of,
)
from scatterpar.train.processes import ALONE, Processes
from scatterpar.train.results import Tally

FIRST = 256  # images; `--base-lr` is the rate for them
_SMALLEST_BATCH = 32  # by default
_STEPS_PER_EPOCH = 50  # by default, at least
# Rates for 256 images, tried on the included images; adamw and rmsprop have adam's, and
# nadam has torch's default (docs/training-tool.md, Models and options). That of another
# class or name is not known, and asked for.
_RATES = {
    "sgd": 0.0125,
    "asgd": 0.05,
    "adam": 0.001,
    "adamw": 0.001,
    "nadam": 0.002,
    "adamax": 0.002,
    "radam": 0.004,
    "rmsprop": 0.001,
    "adagrad": 0.01,
    "adadelta": 1.0,
    "adafactor": 0.01,
    "rprop": 0.01,
    "lion": 0.0003,
    "lamb": 0.005,
}
# Pretrained weights need few steps: twice the rate was better on two of two small sets
# (docs/training-tool.md, Fine-tuning).
_FINE_TUNING_RATES = {"adamw": 0.002}


@dataclass(eq=False)
class Position:
    """How far a run has come: the numbers of a checkpoint."""

    batch: int  # images of a step, at most
    consumed: int = 0  # images that steps have used
    step: int = 0
    tested: int = 0  # epochs that ended with a test
    best: float = -1.0  # test accuracy
    best_epoch: int = 0


class Training(Position):
    """Everything that changes while training, and how it changes.

    Attributes:
        images: the number of images that are trained on.
        epochs: the number of epochs in all.
        classes: the number of classes.
        engine: computes the gradients of a step, and the scores of a test.
        model: what is trained, on the first device.
        head: the layers that `--freeze` trains alone.
        optimizer: makes the steps; its defaults have the rate for `FIRST` images.
        precision: the context of a forward pass, with `--autocast`.
        scaler: keeps gradients of float16 in its range.
        criterion: the loss of a batch.
        average: the average of the weights, with `--ema`.
        about: what `predict` needs to build the model, and `--resume` to know the data.
        processes: as the argument.

    Args:
        options: the options of the run. The attribute has those that follow from the
            model, too: whether it is pretrained, and the optimizer.
        source: the images.
        devices: the device of each replica.
        processes: those that divide the devices and each batch.
        checkpoint: that of a run that goes on.
    """

    def __init__(
        self,
        options: Options,
        source: Source,
        devices: list[torch.device],
        processes: Processes = ALONE,
        checkpoint: Mapping[str, Any] | None = None,
    ) -> None:
        about = describe(options, source)
        saved = None
        if checkpoint is not None:
            saved = checkpoint["about"]
            _refuse_other_images(options, saved, about)
        # torch.manual_seed seeds the generators of accelerators, too.
        torch.manual_seed(seed_host("run", options.seed))
        processes.connect(devices[0])
        model, options = start_model(options, source, saved, processes)
        self.options = options
        self.source = source
        self.processes = processes
        self.images = len(source.parts[TRAIN])
        self.classes = len(source.class_names)
        self.epochs = options.epochs or 0
        self.engine = make_engine(options, model, devices, processes)
        self.model = model
        self.head = head_of(model, self.classes) if options.freeze else []
        # A step has at most all images.
        super().__init__(min(first_batch(options, self.images), self.images))
        if self.images // self.steps_per_epoch < processes.size:
            raise UsageError(
                f"--processes {processes.size} divide each batch, and a batch has "
                f"{self.batch} images: a larger --batch"
            )
        self.optimizer = make_optimizer(model, options)
        self.base_lr: float = self.optimizer.defaults["lr"]
        self.is_scaled_linearly = is_scaled_linearly(str(options.optimizer))
        kind = devices[0].type
        precision = options.autocast
        dtype = getattr(torch, precision or "bfloat16")
        self.precision = torch.autocast(kind, dtype, enabled=bool(precision))
        self.scaler = GradScaler(kind, enabled=precision == "float16")
        self.criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self.average: Any = None
        if options.ema is not None:
            # With buffers: running statistics of other weights would not fit the
            # averaged ones.
            self.average = AveragedModel(model, use_buffers=True)
        for name in ("mean", "std"):
            about[name] = getattr(model, name).flatten().tolist()
        self.about = about
        if checkpoint is not None:
            for name, part in self._parts().items():
                part.load_state_dict(checkpoint[name])
            super().__init__(**checkpoint["position"])

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.consumed // self.images

    @property
    def is_over(self) -> bool:
        """Whether all epochs are tested, or as many as `--patience` says did not
        improve the accuracy.
        """
        patience = self.options.patience or self.epochs
        return self.tested >= min(self.epochs, self.best_epoch + patience)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return -(-self.images // self.batch)

    @property
    def rows_per_step(self) -> int:
        """The number of images of the largest batch of an epoch."""
        return -(-self.images // self.steps_per_epoch)

    def order(self, epoch: int) -> tuple[Tensor, ...]:
        """Return the row numbers of the epoch's batches, whose sizes differ by at most
        one.
        """
        # A function of the epoch alone: a resumed run has drawn nothing before.
        seed = seed_of("order", self.options.seed, epoch)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(self.images, generator=generator)
        return rows.tensor_split(self.steps_per_epoch)

    def requests(self) -> Iterator[BatchRequest]:
        """Yield what the feed must read from here to the end of the run."""
        start = self.consumed
        tested = self.tested
        for epoch in range(self.epoch, self.epochs + 1):
            if epoch > tested:
                yield from self.test_requests(self.source.tested)
            if epoch == self.epochs:
                return
            consumed = epoch * self.images
            for rows in self.order(epoch):
                if consumed >= start:
                    yield BatchRequest(TRAIN, rows, epoch)
                consumed += len(rows)

    def test_requests(self, part: str) -> Iterator[BatchRequest]:
        """Yield what the feed must read for a test."""
        rows = torch.arange(len(self.source.parts[part]))
        # Nothing is kept for a backward pass, so that small batches would only be slow.
        for batch in rows.split(max(FIRST, self.batch)):
            yield BatchRequest(part, batch)

    def peak_rate(self) -> float:
        """Return the learning rate for the images of a step, after the warm-up.

        It grows with the batch for SGD, and with the square root of the batch for
        optimizers that divide by the gradient's size (arXiv:2205.10287), as in timm's
        train.py.
        """
        batches = self.images / self.steps_per_epoch / FIRST
        factor = batches if self.is_scaled_linearly else math.sqrt(batches)
        return self.base_lr * factor

    def rates_in_words(self) -> str:
        """Return the optimizer with its rate, and the average of the weights."""
        scaled = "linearly" if self.is_scaled_linearly else "by the square root"
        rate = f"a learning rate of {self.peak_rate():.3g}"
        words = (
            f"{self.options.optimizer} with {rate}: {self.base_lr:g} for {FIRST} "
            f"images, scaled {scaled}; --base-lr sets it"
        )
        steps = self.epochs * self.steps_per_epoch
        reached = warmed_up_decay(steps)
        if self.options.ema and reached < self.options.ema:
            words += (
                f"\nwarning: --ema {self.options.ema} averages over "
                f"{1 / (1 - self.options.ema):,.0f} steps, and the run has {steps:,}: "
                f"its decay grows to {reached:.3g} only"
            )
        return words

    def rate(self) -> float:
        """Return the learning rate of the next step: warm-up, then a cosine to zero or
        drops.
        """
        epochs = self.consumed / self.images
        epochs_per_step = 1 / self.steps_per_epoch
        warmup = self.options.warmup_epochs or 0
        peak = self.peak_rate()
        if epochs < warmup:
            return peak * (epochs + epochs_per_step) / (warmup + epochs_per_step)
        if self.options.drop_at:
            drops = sum(epochs >= drop for drop in self.options.drop_at)
            return float(peak * 0.1**drops)
        progress = (epochs - warmup) / (self.epochs - warmup)
        return peak * 0.5 * (1 + math.cos(math.pi * progress))

    def train(self, rows: int, batch: Images) -> StepReport | None:
        """Make a step of the optimizer on the readable images of a batch of `rows`, of
        which each process has its part. Returns None if there are none.
        """
        report = None
        if len(batch.labels):
            report = self._update(batch)
            self.step += 1
        elif self.processes.size > 1:
            raise FeedError(
                f"no image of this step can be read by process {self.processes.rank}; "
                "without --processes the step goes on with the others"
            )
        # Unreadable images count, so that all processes end the epoch together.
        self.consumed += rows
        return report

    def _update(self, batch: Images) -> StepReport:
        torch.manual_seed(seed_host("step", self.options.seed, self.consumed))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.engine.train()
        self._freeze()
        self.optimizer.zero_grad()
        with self.precision:
            self.engine.forward_backward(
                batch.images, batch.labels, self.criterion, scaler=self.scaler
            )
        report = self.engine.last_step
        assert report is not None
        # The loss of all processes, so that all end in this step.
        if not math.isfinite(report.loss):
            raise FloatingPointError(f"the loss is {report.loss}")
        if self.options.clip is not None:
            # A norm of gradients that the scaler has multiplied would be clipped at any
            # size.
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            # Initial weights, which are random, do not stay in it.
            decay = warmed_up_decay(int(self.average.n_averaged))
            decay = min(self.options.ema or 0.0, decay)
            self.average.multi_avg_fn = get_ema_multi_avg_fn(decay)
            self.average.update_parameters(self.model)
        return report

    def _freeze(self) -> None:
        """Set what this step trains: in the first epochs of `--freeze` the head alone.

        The other layers compute as in a test: running statistics that follow the new
        images would change what the frozen weights were made for.
        """
        if not self.head:
            return
        is_frozen = self.epoch < self.options.freeze
        self.model.network.train(not is_frozen).requires_grad_(not is_frozen)
        for module in self.head:
            module.train().requires_grad_()

    def tested_weights(self) -> dict[str, Tensor]:
        """Return the network's weights that a test uses: averaged ones if there are
        any.
        """
        model: Any = self.average.module if self.average else self.model
        weights: dict[str, Tensor] = model.network.state_dict()
        return weights

    @torch.no_grad()
    def test(
        self,
        feed: Feed,
        part: str = TEST,
        weights: dict[str, Tensor] | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Tally:
        """Test on the feed's next requests, which are those of a part. All processes
        return the same.

        Args:
            feed: yields the requests of `test_requests`, next.
            part: of the source, such as `TEST`.
            weights: the network's weights; by default those of `tested_weights`.
            between: is called after each batch.
        """
        network = self.model.network
        tally = Tally(self.classes, part)
        rows = len(self.source.parts[part])
        # A copy, because the weights are loaded into the same tensors.
        saved = copy.deepcopy(network.state_dict())
        network.load_state_dict(weights or self.tested_weights())
        self.engine.eval()
        try:
            with self.precision:
                for _, batch, scores in scored(self.engine, feed, rows, self.classes):
                    tally.add(scores, batch.labels, batch.images)
                    between()
        finally:
            network.load_state_dict(saved)
        tally.add_other_processes(self.processes)
        return tally

    def _parts(self) -> dict[str, Any]:
        """Return what changes beside the position, by its name in checkpoints."""
        parts = {
            "model": self.model.network,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "average": self.average,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return what changes while training."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        return {"position": asdict(self), **state}


def first_batch(options: Options, images: int) -> int:
    """Return the images of a run's first step, if there are so many: by default the
    largest power of two, from 32 to 4096, that leaves 50 steps an epoch.

    >>> photos = Options(data="photos")
    >>> [first_batch(photos, images) for images in (30, 480, 60_000, 10**7)]
    [32, 32, 1024, 4096]
    """
    if options.batch is not None:
        return options.batch
    if options.data == EMBEDDED:
        return LARGE_BATCH
    batch = LARGE_BATCH
    while batch > _SMALLEST_BATCH and batch * _STEPS_PER_EPOCH > images:
        batch //= 2
    return batch


def scored(
    engine: Any, feed: Feed, rows: int, classes: int
) -> Iterator[tuple[BatchRequest, Images, Tensor]]:
    """Yield the next `rows` rows, batch by batch: each request, its readable images,
    and their scores.
    """
    while rows:
        request, batch = feed.take()
        rows -= len(request.rows)
        scores = torch.empty(0, classes)
        if len(batch.labels):
            scores = engine(batch.images).float().cpu()[:, :classes]
        yield request, batch, scores


def choose_devices(
    words: str | Sequence[str] | None, processes: Processes = ALONE
) -> list[torch.device]:
    """Return the devices of this process's replicas: its part of those that are named,
    else of all accelerators, else of virtual CPUs, two at least.
    """
    names: Any = parse_devices(words or ())
    # Two replicas show on any machine what a step copies and sums.
    if not names and not torch.accelerator.is_available():
        names = [f"cpu:{number}" for number in range(max(2, processes.size))]
    try:
        devices = list(resolve(names or None))
    except ValueError as error:
        problem = words_of(error).removeprefix("device_ids: ").partition(";")[0]
        raise UsageError(
            f"--devices: {problem}; name them like cuda:0,cuda:1"
        ) from error
    if len(devices) % processes.size:
        raise UsageError(
            f"--processes {processes.size} cannot divide {len(devices)} devices evenly"
        )
    part: list[torch.device] = processes.part_of(devices)
    return part


def start_model(
    options: Options,
    source: Source,
    saved: Mapping[str, Any] | None,
    processes: Processes = ALONE,
) -> tuple[OnPixels, Options]:
    """Build the model with its initial weights. Returns it, and the options, with what
    was chosen.

    Weights are pretrained if the options ask for them, or if a library has them for a
    network on pictures in files, and the first process can have them: the engine sends
    its weights to the others, which look for none. Notes of the source say which.
    """
    name = options.model
    sizes = source.image_shape, len(source.class_names)
    if saved is not None:  # the checkpoint's weights follow: nothing is fetched
        return build_model(name, *sizes, saved["mean"], saved["std"]), options
    if options.pretrained and options.from_scratch:
        raise UsageError("--pretrained and --from-scratch exclude each other")
    is_of_library = has_library_weights(name)
    is_default = is_of_library and not (source.in_memory or options.from_scratch)
    model: OnPixels | None = None
    # The caches of processes may differ, and two would fetch at once.
    if processes.is_first and (options.pretrained or is_default):
        try:
            model = build_model(name, *sizes, pretrained=True)
            note = (
                f"{name} starts from pretrained weights (--from-scratch: from random "
                "ones)"
            )
        except UsageError as error:
            if options.pretrained:
                raise
            reason = str(error).removeprefix(f"--model {name}: ")
            note = (
                f"warning: {name} starts from random weights, as its pretrained ones "
                f"are not cached, and cannot be fetched ({reason:.100})"
            )
        source.notes.append(note)
    pretrained = bool(processes.largest(int(model is not None)))
    if model is None:
        # Again: a try with pretrained weights may have drawn random numbers.
        torch.manual_seed(seed_host("run", options.seed))
        model = build_model(name, *sizes, source.mean, source.std)
    # A function of the user's may have loaded weights.
    is_random = not pretrained and (name == BUILT_IN or is_of_library)
    if options.freeze and is_random:
        raise UsageError(
            f"--freeze {options.freeze}: {name} starts from random weights, of "
            "which the last layer alone learns little"
        )
    # AdamW needs no other rate for each network that it fine-tunes.
    optimizer = options.optimizer or ("AdamW" if pretrained else "SGD")
    return model, replace(options, pretrained=pretrained, optimizer=optimizer)


def make_engine(
    options: Options,
    model: OnPixels,
    devices: list[torch.device],
    processes: Processes,
) -> ScatterOnceParallel[OnPixels]:
    """Build the engine of a model, which it moves to the first device."""
    model.to(devices[0])
    if options.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ScatterOnceParallel(
        model,
        device_ids=devices,
        micro_batch_size=options.micro_batch_size,
        process_group=processes.group,
        # A sub-step has few images: their statistics alone would be noise.
        buffers="batch",
        compile=options.compile or None,
    )


def warmed_up_decay(updates: int) -> float:
    """Return the decay of an average after so many updates: the initial weights, which
    are random, do not stay in it.

    >>> [round(warmed_up_decay(updates), 3) for updates in (1, 30, 1000)]
    [0.182, 0.775, 0.991]
    """
    return (1 + updates) / (10 + updates)


def describe(options: Options, source: Source) -> dict[str, Any]:
    """Return what checkpoints hold about the model and its data."""
    return {
        "model": options.model,
        "image_shape": list(source.image_shape),
        "class_names": list(source.class_names),
        "class_counts": source.class_counts,
        "sizes": {name: len(part) for name, part in source.parts.items()},
    }


def _refuse_other_images(
    options: Options, saved: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Raise a `UsageError` if a run would go on with other images."""
    for name in ("image_shape", "class_names", "class_counts", "sizes"):
        if about[name] != saved[name]:
            raise UsageError(
                f"{options.out} is of a run with other images: its {name} were "
                f"{saved[name]!s:.300}, and those of --data {options.data} are "
                f"{about[name]!s:.300}; restore it, or start a new run with another "
                "--out"
            )


def is_scaled_linearly(optimizer: str) -> bool:
    """Whether the rate grows with the batch itself, by the optimizer's name."""
    return bool(re.search("sgd|momentum|nesterov|lars|larc", optimizer.lower()))


def make_optimizer(model: nn.Module, options: Options) -> Optimizer:
    """Build torch's optimizer of a name, or timm's; biases and norms have no weight
    decay. Its rate is `--base-lr`, or the one that is known for its name.
    """
    name = str(options.optimizer).lower()
    groups = weight_decay_groups(model, options.weight_decay)
    rates = _RATES | _FINE_TUNING_RATES if options.pretrained else _RATES
    keywords: dict[str, Any] = {"lr": options.base_lr or rates.get(name, 0.0)}
    if name == "sgd":
        keywords["momentum"] = options.momentum
        keywords["nesterov"] = options.momentum > 0
    torch_classes = {key.lower(): value for key, value in vars(torch.optim).items()}
    try:
        if name in torch_classes:
            optimizer: Optimizer = torch_classes[name](groups, **keywords)
        else:
            create = library("timm.optim").create_optimizer_v2
            optimizer = create(groups, name, **keywords)
    except (UsageError, AssertionError, TypeError, ValueError) as error:
        similar = suggestion(name, torch_classes)
        raise UsageError(
            f"--optimizer {name}: {words_of(error)} (it is a class of "
            f"torch.optim, or one of timm's names{similar})"
        ) from error
    if not keywords["lr"]:
        raise UsageError(
            f"--optimizer {name}: its learning rate is not known; --base-lr X is that "
            f"for batches of {FIRST} images"
        )
    return optimizer
