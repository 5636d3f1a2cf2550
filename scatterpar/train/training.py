"""A run of the tool, top down: `run` opens the data, the model and the engine;
`Run` trains epoch by epoch; `Training` is one step, the test, and the learning rate.

The order of the images, the random numbers of a step and its learning rate are
functions of the seed and of the number of images used so far. So a resumed run has the
same bits.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scatterpar import ScatterOnceParallel
from scatterpar.train import records
from scatterpar.train.command_line import (
    EMBEDDED,
    LARGE_BATCH,
    METRICS_FILE,
    Options,
    UsageError,
    as_words,
    exit_code_of,
    parse,
    say,
    words_of,
)
from scatterpar.train.data import (
    TEST,
    TRAIN,
    VAL,
    BatchRequest,
    Broken,
    Images,
    Source,
    open_data,
    seed_host,
    seed_of,
)
from scatterpar.train.feed import Feed, FeedError
from scatterpar.train.libraries import library, suggestion
from scatterpar.train.models import OnPixels, build_model, start_model
from scatterpar.train.records import (
    BEST_FILE,
    CONFUSION_FILE,
    CURVES_FILE,
    FILE,
    FINISHED,
    FIRST_BATCH_FILE,
    MISTAKES_FILE,
    Metrics,
    Progress,
    Tally,
)

FIRST = 256  # images; `--base-lr` is the rate for them
_SMALLEST_BATCH = 32  # by default
_STEPS_PER_EPOCH = 50  # by default, at least
_MOMENTUM = 0.9  # of SGD
# Rates for 256 images. One run each on the included images: sgd reaches 85.4 %, nadam,
# at torch's default, 85.1 %, adam 82.6 %, adamw and rmsprop, at adam's rate, 82.5 and
# 82.0 %. The rate of another class or name is not known, and asked for.
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
# Pretrained weights need few steps: twice adam's rate was better on two of two small
# sets (68.7 % beside 61.0 %, and 60.0 % beside 44.7 %).
_FINE_TUNING_RATES = {"adamw": 0.002}
_WRITTEN = (METRICS_FILE, CURVES_FILE, CONFUSION_FILE, MISTAKES_FILE, FIRST_BATCH_FILE)
# Packages whose versions are recorded, because other ones may give other results.
_RECORDED = ("scatterpar", "torch", "torchvision", "timm", "numpy", "PIL")
_FEW_IMAGES = 5000  # to train on: fewer than CIFAR's, from which networks learn alone
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Between drawings before the last one, of which each takes half a second.
_SECONDS_OF_DRAWINGS = 60.0
_SHOWN_FILES = 20  # that cannot be read


def main(arguments: Sequence[str]) -> int:
    """Run the tool. Returns the exit code. A wrong argument prints one line on
    stderr.
    """
    return exit_code_of("train", lambda: run(arguments))


def run(arguments: Sequence[str]) -> int:
    """Train as the command line says; return the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "start it without torchrun: one process uses all GPUs of this machine (for "
            "several machines: docs/several-machines.md)"
        )
    options = parse(arguments)
    out = options.out
    checkpoint: dict[str, Any] | None = None
    if options.resume is not None:
        checkpoint = records.load(out / FILE, goes_on=True)
        options = parse(arguments, checkpoint["words"])
        if records.is_finished(out):
            position = checkpoint["position"]
            reached = f"{position['tested']} epochs and {position['step']} steps"
            say(
                f"{out}: finished before, after {reached}; --out starts a new run in "
                "another folder"
            )
            return 0
    else:
        records.refuse_earlier_run(out)
    devices = choose_devices(options.devices)
    source = open_data(options)
    about = describe(options, source)
    # torch.manual_seed seeds the generators of accelerators, too.
    torch.manual_seed(seed_host("run", options.seed))
    if checkpoint is None:
        model = start_model(options, source)
    else:
        about["left_out"] = checkpoint["about"]["left_out"]
        _refuse_other_images(options, checkpoint["about"], about)
        model = build_model(
            options.model,
            source.image_shape,
            len(source.class_names),
            checkpoint["about"]["mean"],
            checkpoint["about"]["std"],
        )
    with records.locked(out, goes_on=checkpoint is not None):
        if checkpoint is None and not source.in_memory:
            about["left_out"] = _broken_pictures(source, options)
        source.leave_out([Broken(*picture) for picture in about["left_out"]])
        training = Training(options, source, model, devices, about, checkpoint)
        with (
            training.engine,
            Metrics(out / METRICS_FILE, training.step) as metrics,
            Feed(source) as feed,
        ):
            return Run(training, metrics, feed).train()


def _broken_pictures(source: Source, options: Options) -> list[list[str]]:
    """Decode all pictures, and return those that cannot be read, which are left out.
    Raises a `UsageError` if they are more than `--skip-broken`.
    """
    broken = []
    with Progress(
        sum(len(part.rows) for part in source.parts.values()), file=sys.stdout
    ) as progress:
        progress.describe("checking the images")
        for picture in source.broken_pictures(options.workers):
            progress.update()
            if picture is not None:
                broken.append(picture)
    number = len(broken)
    for picture in broken[:_SHOWN_FILES]:
        say(f"{picture.file} cannot be read as an image: {picture.reason}")
    if number > options.skip_broken:
        raise UsageError(
            f"{number} of the images cannot be read, such as {broken[0].file}: "
            f"{broken[0].reason}; --skip-broken {number} leaves out so many"
        )
    if broken:
        say(f"left out: {number} images that cannot be read")
    return [list(picture) for picture in broken]


@dataclass(eq=False)
class Position:
    """How far a run has come: the numbers of a checkpoint."""

    consumed: int = 0  # images that steps have used
    step: int = 0
    tested: int = 0  # epochs that ended with a test
    best: float = -1.0  # test accuracy
    best_epoch: int = 0


class Training(Position):
    """Everything that changes while training, and how it changes.

    Attributes:
        images: the number of images that are trained on.
        batch: the number of images of a step, at most.
        epochs: the number of epochs in all.
        classes: the number of classes.
        engine: computes the gradients of a step, and the scores of a test.
        model: what is trained, on the first device.
        optimizer: makes the steps; its defaults have the rate for `FIRST` images.
        precision: the context of a forward pass, with `--autocast`.
        scaler: keeps gradients of float16 in its range.
        criterion: the loss of a batch.
        average: the average of the weights, with `--ema`.
        about: what `predict` needs to build the model, and `--resume` to know the data.

    Args:
        options: the options of the run.
        source: the images.
        model: the model, on the CPU.
        devices: the device of each replica.
        about: as the attribute.
        checkpoint: that of a run that goes on.
    """

    def __init__(
        self,
        options: Options,
        source: Source,
        model: OnPixels,
        devices: Sequence[str | int],
        about: dict[str, Any],
        checkpoint: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.images = len(source.parts[TRAIN].rows)
        self.classes = len(source.class_names)
        self.epochs = options.epochs or 0
        # A step has at most all images.
        self.batch = min(default_batch(options, self.images), self.images)
        self.engine = make_engine(options, model, devices)
        self.model = model
        if options.optimizer is None:
            # AdamW needs no other rate for each network that it fine-tunes.
            name = "AdamW" if is_fine_tuned(options) else "SGD"
            options = dataclasses.replace(options, optimizer=name)
        self.options = options
        self.optimizer = make_optimizer(model, options)
        self.base_lr: float = self.optimizer.defaults["lr"]
        self.is_scaled_linearly = is_scaled_linearly(str(options.optimizer))
        kind = torch.device(devices[0]).type
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
        # A small last batch would have a noisy gradient at the same rate.
        return rows.tensor_split(self.steps_per_epoch)

    def requests(self) -> Iterator[BatchRequest]:
        """Yield what the feed must read from here to the end of the run."""
        start = self.consumed
        tested = self.tested
        for epoch in range(self.epoch, self.epochs + 1):
            # The test of an epoch comes when the next one begins.
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
        rows = torch.arange(len(self.source.parts[part].rows))
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
        """Return the learning rate of the next step: warm-up, then a cosine to
        zero.
        """
        epochs = self.consumed / self.images
        epochs_per_step = 1 / self.steps_per_epoch
        warmup = self.options.warmup_epochs or 0
        peak = self.peak_rate()
        if epochs < warmup:
            return peak * (epochs + epochs_per_step) / (warmup + epochs_per_step)
        progress = (epochs - warmup) / (self.epochs - warmup)
        return peak * 0.5 * (1 + math.cos(math.pi * progress))

    def train(self, batch: Images) -> Any:
        """Make a step of the optimizer on a batch. Returns the engine's report."""
        torch.manual_seed(seed_host("step", self.options.seed, self.consumed))
        # Not by a scheduler, which would be state that a checkpoint has to hold.
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.engine.train()
        self.optimizer.zero_grad()
        with self.precision:
            self.engine.forward_backward(
                batch.images, batch.labels, self.criterion, scaler=self.scaler
            )
        report = self.engine.last_step
        assert report is not None
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
        self.step += 1
        self.consumed += len(batch.labels)
        return report

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
        """Test on the feed's next requests, which are those of a part.

        Args:
            feed: yields the requests of `test_requests`, next.
            part: of the source, such as `TEST`.
            weights: the network's weights; by default those of `tested_weights`.
            between: is called after each batch.
        """
        network = self.model.network
        tally = Tally(self.classes, part)
        # A copy, because the weights are loaded into the same tensors.
        saved = copy.deepcopy(network.state_dict())
        network.load_state_dict(weights or self.tested_weights())
        self.engine.eval()
        try:
            for _ in self.test_requests(part):
                _, batch = feed.take()
                with self.precision:
                    scores = scores_of(self.engine, batch.images, self.classes)
                tally.add(scores, batch.labels, batch.images)
                between()
        finally:
            network.load_state_dict(saved)
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


def default_batch(options: Options, images: int) -> int:
    """Return the images of a step, if there are so many: by default the largest power
    of two, from 32 to 4096, that leaves 50 steps an epoch.

    >>> photos = Options(data="photos")
    >>> [default_batch(photos, images) for images in (30, 480, 60_000, 10**7)]
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


def scores_of(engine: Any, images: Tensor, classes: int) -> Tensor:
    """Return the scores of images, on the CPU."""
    if not len(images):
        return torch.empty(0, classes)
    scores: Tensor = engine(images).float().cpu()
    # A network may make more scores than there are classes.
    return scores[:, :classes]


def choose_devices(words: Sequence[str]) -> list[str | int]:
    """Return the devices of the replicas: those that are named, else all accelerators,
    else two virtual CPUs.
    """
    names = " ".join(words).replace(",", " ").split()
    if not names:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # Two replicas show on any machine what a step copies and sums.
        if accelerator is None:
            return ["cpu:0", "cpu:1"]
        return list(range(torch.accelerator.device_count()))
    devices: list[str | int] = []
    for name in names:
        device = int(name) if name.isdecimal() else name  # of an accelerator
        try:
            # The only way to ask that all kinds of devices have.
            torch.empty(0, device=torch.device(device))
        except (AssertionError, RuntimeError) as error:
            raise UsageError(
                f"--devices: {name} is not a device that is here; name them like "
                f"cuda:0,cuda:1 ({words_of(error):.100})"
            ) from error
        devices.append(device)
    return devices


def make_engine(
    options: Options, model: OnPixels, devices: Sequence[str | int]
) -> ScatterOnceParallel[OnPixels]:
    """Build the engine of a model, which it moves to the first device."""
    model.to(torch.device(devices[0]))
    if options.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ScatterOnceParallel(
        model,
        device_ids=devices,
        micro_batch_size=options.micro_batch_size,
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
        "names": source.digest,
        "left_out": [],
    }


def _refuse_other_images(
    options: Options, saved: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Raise a `UsageError` if a run would go on with other images."""
    for name in ("image_shape", "class_names", "class_counts", "names"):
        if about[name] == saved[name]:
            continue
        difference = (
            f"its {name} were {saved[name]!s:.300}, and those of --data "
            f"{options.data} are {about[name]!s:.300}"
        )
        if name == "names":
            difference = (
                f"--data {options.data} has as many images, but some have other names, "
                "so that images to test on may be among those to train on"
            )
        raise UsageError(
            f"{options.out} is of a run with other images: {difference}; restore them, "
            "or start a new run with another --out"
        )


def is_fine_tuned(options: Options) -> bool:
    """Whether the model starts from weights that are not random."""
    return options.pretrained or options.weights is not None


def is_scaled_linearly(optimizer: str) -> bool:
    """Whether the rate grows with the batch itself, by the optimizer's name."""
    return bool(re.search("sgd|momentum|nesterov|lars|larc", optimizer.lower()))


def make_optimizer(model: nn.Module, options: Options) -> Optimizer:
    """Build torch's optimizer of a name, or timm's; biases and norms have no weight
    decay. Its rate is `--base-lr`, or the one that is known for its name.
    """
    name = str(options.optimizer).lower()
    rates = _RATES | _FINE_TUNING_RATES if is_fine_tuned(options) else _RATES
    rate = options.base_lr or rates.get(name)
    # On a small network: an optimizer may need more than gradients.
    trial = nn.Linear(2, 2)
    for parameter in trial.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        _named_optimizer(name, trial, rate or 1.0, options.weight_decay).step()
    except Exception as error:  # each optimizer has its own
        known = {key.lower() for key in vars(torch.optim)}
        similar = "" if name in known else suggestion(name, known)
        raise UsageError(
            f"--optimizer {name} cannot be used: {words_of(error):.200} (it is a class "
            "of torch.optim that needs gradients alone, or one of timm's names"
            f"{similar})"
        ) from error
    if rate is None:
        raise UsageError(
            f"--optimizer {name}: its learning rate is not known; --base-lr X is that "
            f"for batches of {FIRST} images"
        )
    return _named_optimizer(name, model, rate, options.weight_decay)


def _named_optimizer(
    name: str, model: nn.Module, rate: float, weight_decay: float
) -> Optimizer:
    groups = parameter_groups(model, weight_decay)
    keywords: dict[str, Any] = {"lr": rate}
    if name == "sgd":
        keywords["momentum"] = _MOMENTUM
        keywords["nesterov"] = True
    torch_classes = {key.lower(): value for key, value in vars(torch.optim).items()}
    if name in torch_classes:
        optimizer: Optimizer = torch_classes[name](groups, **keywords)
        return optimizer
    created: Optimizer = library("timm.optim").create_optimizer_v2(
        groups, name, **keywords
    )
    return created


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of parameters: biases and scales of normalisation, which are
    vectors, have no weight decay (as in timm).
    """
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    return [
        {"params": others, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


@dataclass(eq=False)
class Run:
    """The epochs of one run, and its results so far.

    Attributes:
        training: what changes while training.
        metrics: the records.
        feed: the images.
        progress: the bar.
        options: the options of the run.
        tested: the part that each epoch is tested on, such as ``"val"``.
    """

    training: Training
    metrics: Metrics
    feed: Feed
    _signals: list[int] = field(default_factory=list)  # numbers of those received
    _copied: str = ""  # what the last step copied, in words
    _step_ended: float = 0.0  # when the last step ended, or the test after it

    def __post_init__(self) -> None:
        training = self.training
        self.options = training.options
        self.tested = training.source.tested
        self.progress: Progress
        self._saved = training.step
        self._drawn = time.perf_counter()  # when a drawing ended
        # What is drawn: the test of the best epoch, or the one at the end.
        self._shown = Tally(training.classes, self.tested)
        if training.tested:
            best = records.load(self.options.out / BEST_FILE)
            # A killed run may have written that of a later epoch.
            if best["accuracy"] == training.best:
                self._shown.confusion = best["confusion"]

    def train(self) -> int:
        """Train all epochs, print and write what was reached, and return the exit
        code.
        """
        try:
            self._announce()
            # After the lines, so that the bar is below them.
            with Progress(
                self.training.epochs * self.training.images,
                self.training.consumed,
                file=sys.stdout,
            ) as self.progress:
                return self._train()
        except UsageError as error:
            raise UsageError(f"{error}; {self._kept()}") from error
        except ValueError as error:
            # torch's layers say so of one row, which no option names.
            if "more than 1 value per channel" not in str(error):
                raise
            raise UsageError(
                "a sub-step has one image, of which batch normalisation has no "
                f"statistics: --batch with two images for each device; {self._kept()}"
            ) from error
        except OSError as error:  # of a print, or of a library
            if error.errno in _FULL_DISK:
                raise UsageError(f"{error.strerror}; {self._kept()}") from error
            raise

    def _train(self) -> int:
        code = 0
        ending = FINISHED
        try:
            with records.stoppable("saving at the end of this step") as self._signals:
                self._train_epochs()
        except FloatingPointError as error:
            code = 1
            ending = f"training diverged ({error}); a lower --base-lr may help; stopped"
        # The weights are those of the last whole step: saving them loses nothing.
        except (KeyboardInterrupt, FeedError):
            self._save()
            if not self._signals:  # a signal may have ended the workers, too
                raise
            number = self._signals[0]
            name = signal.Signals(number).name
            ending = "interrupted" if number == signal.SIGINT else f"ended by {name}"
            code = 128 + number
        self._finish(ending)
        return code

    def _announce(self) -> None:
        """Record how the run starts; print the model, the data, and how the work is
        divided.
        """
        training = self.training
        source = training.source
        engine = training.engine
        step = training.step
        # Those that the run uses are imported by now.
        imported = [name for name in _RECORDED if name in sys.modules]
        self.metrics.write(
            "run",
            step=step,
            options=vars(self.options),
            command=sys.argv,
            versions={name: sys.modules[name].__version__ for name in imported},
            devices=[str(share) for share in engine.device_ids],
        )
        parameters = sum(tensor.numel() for tensor in training.model.parameters())
        rows = training.rows_per_step
        lines = [
            f"writing to {self.options.out}",
            str(source),
            source.classes_in_words(),
            *source.notes,
            f"{self.options.model}: {parameters:,} parameters",
            str(engine.plan(rows)),
        ]
        if step:
            images = f"{training.consumed:,} images"
            lines.append(f"resumed after {step} steps, {images}")
        else:
            steps = f"{training.steps_per_epoch} steps an epoch of {training.images:,}"
            lines.append(f"batches of {rows:,}, for {steps}; --batch sets it")
            lines.append(training.rates_in_words())
        say(*lines)

    def _train_epochs(self) -> None:
        training = self.training
        self.feed.request(training.requests())
        # It is called once per sub-step, so that the bar moves within a step.
        training.criterion.register_forward_hook(self.progress.add)
        # A large batch takes a while.
        self.progress.describe("reading the first batch")
        while training.tested < training.epochs:
            self._step_ended = time.perf_counter()
            # The session before may have ended between the last step of an epoch and
            # its test.
            while training.epoch == training.tested:
                self._train_step()
            self._end_epoch()
        if training.source.parts.keys() >= {VAL, TEST}:
            best = records.load(self.options.out / BEST_FILE)
            self.feed.request(training.test_requests(TEST))
            self._shown = training.test(self.feed, TEST, best["model"], self._check)

    def _check(self) -> None:
        """Raise `KeyboardInterrupt` if there was a signal."""
        if self._signals:
            raise KeyboardInterrupt

    def _train_step(self) -> None:
        """Train on a batch, record the step, and write a checkpoint if it is due."""
        training = self.training
        _, batch = self.feed.take()
        images = len(batch.labels)
        path = self.options.out / FIRST_BATCH_FILE
        if not path.exists():
            class_names = training.source.class_names
            records.draw_first_batch(batch.images, batch.labels, class_names, path)
            self.progress.describe("computing the first step")
        self.progress.begin(images)
        report = training.train(batch)
        self._copied = traffic(report, training.model)
        end = time.perf_counter()
        seconds = end - self._step_ended
        self._step_ended = end
        waited = self.feed.waited
        epoch = training.tested + 1
        self.metrics.write(
            "step",
            step=training.step,
            epoch=epoch,
            images=images,
            loss=report.loss,
            learning_rate=training.optimizer.param_groups[0]["lr"],
            seconds_whole=seconds,
            seconds_waited=waited,
            seconds=report.seconds,
            bytes=report.bytes,
            messages=report.messages,
        )
        self.progress.describe(
            f"epoch {epoch}/{training.epochs}",
            loss=f"{report.loss:.4f}",
            waiting=f"{waited / seconds:.0%}",
        )
        self.progress.report(training.consumed)
        if training.epoch < epoch:  # at the end of the epoch the test comes first
            self._save(self.options.checkpoint_every)
        self._check()

    def _end_epoch(self) -> None:
        """Test, record and print the results, and keep the best weights."""
        training = self.training
        tally = training.test(self.feed, self.tested, between=self._check)
        training.tested = training.epoch
        self._record_epoch(tally)
        if tally.accuracy > training.best:
            training.best = tally.accuracy
            training.best_epoch = training.tested
            self._shown = tally
            records.save(
                self.options.out / BEST_FILE,
                model=training.tested_weights(),
                accuracy=tally.accuracy,
                confusion=tally.confusion,
                about=training.about,
            )
        if time.perf_counter() - self._drawn >= _SECONDS_OF_DRAWINGS:
            self._draw()
        self._save()

    def _record_epoch(self, tally: Tally) -> None:
        """Record and print the results of an epoch."""
        training = self.training
        number = training.epoch
        # From the records, because the epoch may have begun in an earlier session.
        steps = [
            step for step in self.metrics.of_kind("step") if step["epoch"] == number
        ]

        def total(name: str) -> float:
            return float(sum(step[name] for step in steps))

        images = total("images")
        seconds = total("seconds_whole") or 1.0
        waited = total("seconds_waited")
        loss = sum(step["loss"] * step["images"] for step in steps) / images
        speed = images / seconds
        left_out = len(training.about["left_out"])
        part = self.tested
        measured = {
            f"{part}_loss": tally.loss,
            f"{part}_accuracy": tally.accuracy,
            f"{part}_accuracy_top5": tally.accuracy_top5,
        }
        self.metrics.write(
            "epoch",
            epoch=number,
            step=training.step,
            batch=training.rows_per_step,
            train_loss=loss,
            **measured,
            images_per_second=speed,
            seconds=seconds,
            seconds_waited=waited,
            left_out=left_out,
        )
        words = [
            f"epoch {number}/{training.epochs}: loss {loss:.4f}",
            f"{part} loss {tally.loss:.4f}",
            f"{part} accuracy {tally.accuracy:.2%}",
        ]
        if training.classes >= records.TOP_5_CLASSES:
            words.append(f"top-5 accuracy {tally.accuracy_top5:.2%}")
        words.append(f"{speed:,.0f} images/s")
        if not training.source.in_memory:
            words.append(f"waiting {waited / seconds:.0%}")
        if left_out:
            words.append(f"{left_out} broken files left out")
        say(", ".join(words))

    def _save(self, every: int = 0) -> None:
        """Write a checkpoint if there were `every` steps since the last one."""
        step = self.training.step
        # Before the first step there is nothing to go on from, and the folder stays
        # free for another try.
        if step and step - self._saved >= every:
            records.save(
                self.options.out / FILE,
                **self.training.state_dict(),
                words=list(as_words(vars(self.options))),
                about=self.training.about,
            )
            self._saved = step

    def _kept(self) -> str:
        """Return which checkpoint there is, in words."""
        if not self._saved:
            return "no checkpoint was written yet"
        checkpoint = f"the checkpoint after step {self._saved}"
        return f"{checkpoint} is kept: --resume goes on from it"

    def _draw(self) -> None:
        """Draw the curves, the confusion matrix and the mistakes."""
        training = self.training
        class_names = training.source.class_names
        out = self.options.out
        shown = self._shown
        path = out / CURVES_FILE
        records.draw_curves(
            self.metrics, path, images=training.images, tested=self.tested
        )
        if shown.confusion is not None:
            title = f"Images of {shown.part}, best epoch"
            path = out / CONFUSION_FILE
            records.draw_confusion(shown.confusion, class_names, title, path)
        if shown.images:  # None, if an earlier session has tested and drawn them.
            path = out / MISTAKES_FILE
            records.draw_mistakes(shown.mistakes, class_names, path)
        self._drawn = time.perf_counter()

    def _finish(self, ending: str) -> None:
        """Draw, record and print the results, even if the run ended early. The last
        lines are the result, where it is, and the next command.
        """
        training = self.training
        options = self.options
        out = options.out
        seconds = self.metrics.elapsed
        self._draw()
        reached = f"{training.epoch} of {training.epochs} epochs, {training.step} steps"
        lines = [f"{ending} after {reached}, {seconds:.1f} s"]
        if self._copied:
            lines.append(self._copied)
        accuracies, words = self._accuracies()
        left_out = [Broken(*picture) for picture in training.about["left_out"]]
        # The last record: a run with it has written all results.
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=training.epoch,
            steps=training.step,
            seconds=seconds,
            best_epoch=training.best_epoch,
            **accuracies,
            left_out={picture.file: picture.reason for picture in left_out},
        )
        # A run that ended early has not written all of them.
        names = [name for name in _WRITTEN if (out / name).exists()]
        lines += [*words, f"wrote {', '.join(names)} in {out}"]
        is_few = training.images < _FEW_IMAGES and not training.source.in_memory
        if is_few and not is_fine_tuned(options):
            lines.append(
                f"with few images ({training.images:,}) pretrained weights help most: "
                "--model timm:resnet18 --pretrained"
            )
        if training.tested:
            best = f"best epoch: {training.best_epoch}, {self.tested} accuracy"
            lines += [
                f"{best} {training.best:.2%}, in {out / BEST_FILE}",
                f"to use it: python -m scatterpar predict {out} PICTURES",
                f"to use it elsewhere: python -m scatterpar export {out}",
            ]
        say(*lines)
        if ending != FINISHED and self._saved:
            words = [sys.executable, "-m", "scatterpar", "train", "--resume", str(out)]
            say(
                f"saved after step {self._saved}; this goes on from there:",
                f"  {shlex.join(words)}",
            )

    def _accuracies(self) -> tuple[dict[str, Any], list[str]]:
        """Return the accuracies of the summary, and the lines that say them. All are
        those of the best epoch's weights.
        """
        accuracies: dict[str, Any] = {"test_accuracy": None}
        training = self.training
        shown = self._shown
        if not training.tested:
            words = f"{self.tested} accuracy: not measured, no epoch was finished"
            return accuracies, [words]
        accuracies[f"{self.tested}_accuracy"] = training.best
        lines = [f"{self.tested} accuracy: {training.best:.2%}"]
        if shown.part != self.tested:
            accuracies["test_accuracy"] = shown.accuracy
            lines.append(
                f"test accuracy: {shown.accuracy:.2%}, of the best epoch's weights"
            )
        if shown.confusion is not None:
            class_names = training.source.class_names
            per_class = records.accuracy_per_class(shown.confusion, class_names)
            accuracies["accuracy_per_class"] = per_class
            lines.append(records.accuracies_in_words(per_class))
        return accuracies, lines


def traffic(report: Any, model: nn.Module) -> str:
    """Return how many bytes a step copied between memories, beside `nn.DataParallel`;
    nothing if both would copy as many.
    """
    calls = max(len(share.micro_batches) for share in report.plan.shares)
    # Rows are copied once. nn.DataParallel is called for each sub-step, and each call
    # broadcasts the whole model and reduces all gradients again.
    rows = report.bytes["scatter"]
    # Not ``bytes["reduce"]``: the engine copies those of a large model once more.
    others = len({share.device for share in report.plan.shares}) - 1
    gradients = others * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    per_call = report.bytes["replicate"] + gradients
    if calls == 1 or not per_call:
        return ""
    return (
        f"copied per step: {sum(report.bytes.values()):,} bytes; nn.DataParallel, "
        f"called for each of {calls} sub-steps, copies {rows + calls * per_call:,}"
    )
