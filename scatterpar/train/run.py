"""A whole run: set up, train epoch by epoch, and report what was reached."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from scatterpar.engine import ScatterOnceParallel
from scatterpar.recipe import gradual_warmup, linear_scaled_lr, weight_decay_groups
from scatterpar.report import StepReport
from scatterpar.train import data as data_sources
from scatterpar.train.check import check_gradients, make_engine
from scatterpar.train.data import Dataset
from scatterpar.train.device_choice import choose_devices
from scatterpar.train.errors import UsageError
from scatterpar.train.loop import Batches, Training, evaluate, train_epoch
from scatterpar.train.model_choice import build_model
from scatterpar.train.report import Metrics, draw_curves, require_extras
from scatterpar.train.traffic import Traffic

CRITERION = nn.CrossEntropyLoss()


@dataclass(frozen=True)
class Options:
    """The command line's options, one field each."""

    data: str
    image_size: int
    model: str
    batch: int
    accum: int
    micro_batch_size: int | None
    replicas: int | None
    devices: str | None
    epochs: int
    base_lr: float
    warmup_epochs: int
    momentum: float
    weight_decay: float
    seed: int
    out: Path
    check: bool


def run(options: Options) -> int:
    """Train as the options say; return the exit code: 0, 1 for a failed check or diverged
    training, 130 when interrupted.

    Raises:
        UsageError: the options do not go together, or name what is not there.
    """
    require_extras()
    devices = choose_devices(options.devices, options.replicas)
    data = data_sources.load(options.data, options.image_size)
    torch.manual_seed(options.seed)
    model = build_model(options.model, data.image_shape, data.classes).to(devices[0])
    engine = make_engine(model, options.accum, options.micro_batch_size, devices)
    with engine, Metrics(options.out / "metrics.jsonl") as metrics:
        training = _prepare(engine, model, data, options)
        _announce(training, data, options)
        if options.check and not _check(model, training, data, options, devices):
            return 1
        return _Run(training, data, options, metrics).train()


def _prepare(
    engine: ScatterOnceParallel, model: nn.Module, data: Dataset, options: Options
) -> Training:
    batches = Batches(len(data.train), options.batch, options.seed)
    _require_rows_to_normalise(model, engine, batches)
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
    return Training(engine, optimizer, scheduler, batches)


def _require_rows_to_normalise(
    model: nn.Module, engine: ScatterOnceParallel, batches: Batches
) -> None:
    if not any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules()):
        return
    full = min(batches.batch, batches.rows)
    for rows in {full, batches.rows % batches.batch or full}:
        shares = engine.plan(rows).shares
        if min(stop - start for share in shares for start, stop in share.micro_batches) == 1:
            raise UsageError(
                f"a batch of {rows} rows makes micro-batches of one row, which batch normalisation "
                "cannot train on: choose another --batch, or fewer --accum or --replicas"
            )


def _announce(training: Training, data: Dataset, options: Options) -> None:
    print(data)
    if options.data == data_sources.EMBEDDED and data_sources.INSTALLED.is_dir():
        print(
            f"(all of Fashion-MNIST is installed in {data_sources.INSTALLED}: "
            f"--data {data_sources.INSTALLED_NAME} trains on it)"
        )
    parameters = sum(parameter.numel() for parameter in training.engine.parameters())
    print(f"{options.model}: {parameters:,} parameters")
    print(training.engine.plan(min(options.batch, len(data.train))), flush=True)


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
    check = check_gradients(model, images, labels, CRITERION, *cut)
    print(check)
    return check.passed


class _Run:
    """The epochs of one run, and what has been reached so far."""

    def __init__(
        self, training: Training, data: Dataset, options: Options, metrics: Metrics
    ) -> None:
        from tqdm import tqdm

        self.training = training
        self.data = data
        self.options = options
        self.metrics = metrics
        self.traffic = Traffic(training.engine.module, row_bytes=4 * data.classes)
        self.step = 0
        self.accuracy: float | None = None
        tqdm.monitor_interval = 0  # no thread that watches over the bar: every step updates it
        self.bar = tqdm(
            total=options.epochs * len(data.train),
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
        )

    def train(self) -> int:
        """Train all epochs, and report also when that ends early; return the exit code."""
        self.metrics.write(
            "run", **{**dataclasses.asdict(self.options), "out": str(self.options.out)}
        )
        start = time.perf_counter()
        code, ending = 0, "finished"
        try:
            while self.training.batches.epoch < self.options.epochs:
                self._train_epoch()
        except KeyboardInterrupt:
            code, ending = 130, "interrupted"
        except FloatingPointError as error:
            code, ending = 1, f"training diverged ({error}); a lower --base-lr may help; stopped"
        finally:
            self.bar.close()
        self._summarise(ending, time.perf_counter() - start)
        return code

    def _train_epoch(self) -> None:
        number = self.training.batches.epoch + 1
        self.bar.set_description(f"epoch {number}/{self.options.epochs}")
        start, loss = time.perf_counter(), 0.0
        for report, rate in train_epoch(self.training, self.data, CRITERION):
            loss += report.loss * report.plan.rows / len(self.data.train)
            self._after_step(number, rate, report)
        seconds = time.perf_counter() - start
        test_loss, self.accuracy = evaluate(
            self.training.engine, self.data, self.data.test, self.options.batch, CRITERION
        )
        speed = len(self.data.train) / seconds
        self.metrics.write(
            "epoch",
            epoch=number,
            step=self.step,
            train_loss=loss,
            test_loss=test_loss,
            test_accuracy=self.accuracy,
            images_per_second=speed,
            seconds=seconds,
        )
        self.bar.write(
            f"epoch {number}/{self.options.epochs}: loss {loss:.4f}, test loss {test_loss:.4f}, "
            f"test accuracy {self.accuracy:.2%}, {speed:,.0f} images/s",
            file=sys.stdout,
        )
        sys.stdout.flush()

    def _after_step(self, epoch: int, rate: float, report: StepReport) -> None:
        self.step += 1
        self.traffic.add(report.plan, report.bytes)
        self.metrics.write(
            "step",
            step=self.step,
            epoch=epoch,
            images=report.plan.rows,
            loss=report.loss,
            learning_rate=rate,
            seconds=report.seconds,
            bytes=report.bytes,
            messages=report.messages,
        )
        self.bar.set_postfix(loss=f"{report.loss:.4f}", refresh=False)
        self.bar.update(report.plan.rows)

    def _summarise(self, ending: str, seconds: float) -> None:
        epochs = self.training.batches.epoch
        print(
            f"{ending} after {epochs} of {self.options.epochs} epochs, {self.step} steps, "
            f"{seconds:.1f} s"
        )
        if self.accuracy is None:
            print("test accuracy: not measured, no epoch was finished")
        else:
            print(f"test accuracy: {self.accuracy:.2%}")
        if self.step:
            print(self.traffic)
        self.metrics.write(
            "summary",
            ending=ending,
            epochs=epochs,
            steps=self.step,
            seconds=seconds,
            test_accuracy=self.accuracy,
            bytes_counted=self.traffic.counted,
            bytes_data_parallel_computed=self.traffic.computed,
        )
        picture = self.options.out / "curves.png"
        draw_curves(self.metrics.records, picture)
        print(f"wrote {self.options.out / 'metrics.jsonl'} and {picture}")
