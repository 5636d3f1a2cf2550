"""The training loop: what a user of the engine writes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from scatterpar import ScatterOnceParallel, StepReport
from scatterpar.train.feed import Feed
from scatterpar.train.machines import Machines
from scatterpar.train.random_state import seed_of

IGNORED_LABEL = -100  # the `ignore_index` of torch's own losses


class Stopped(Exception):
    """The user, or whoever runs the machine, wants the run to end."""


class Stopping:
    """Ctrl-C and SIGTERM, while it is entered: wait until a step has ended; a second one does not.

    Attributes:
        signal: the one that has come, or 0.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell does with its jobs
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        name = signal.Signals(number).name
        # Not print, which may have been interrupted itself.
        os.write(2, f"\n{name}: saving at the end of this step; again: ending now\n".encode())

    def check(self, machines: Machines | None = None) -> None:
        """End the run if it is to end.

        Args:
            machines: where all ranks ask at this point, they end together.

        Raises:
            Stopped: a signal has come.
        """
        if machines is not None:
            self.signal = machines.largest(self.signal)
        if self.signal:
            raise Stopped


class Batches:
    """The order in which the training rows are used, and how far it has come.

    Each epoch is a new random order of all rows, decided by `seed` and the epoch's number
    alone; its last batch has what is left. `consumed`, the samples used so far, is the whole
    state; whoever uses a batch adds its rows to it. Between epochs `batch` may change.

    >>> batches = Batches(rows=5, batch=2, seed=0)
    >>> [len(rows) for rows in batches.rest_of_epoch()]
    [2, 2, 1]
    >>> batches.consumed = 5 + 2
    >>> batches.epoch, [len(rows) for rows in batches.rest_of_epoch()]
    (1, [2, 1])
    """

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows = rows
        self.batch = batch
        self.seed = seed
        self.consumed = 0

    @property
    def epoch(self) -> int:
        """The number of epochs finished."""
        return self.consumed // self.rows

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch, a smaller last one included."""
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
    """Everything that changes while training, in one place, and how a step is made."""

    engine: ScatterOnceParallel
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: Batches
    machines: Machines = field(default_factory=Machines)
    scaler: torch.amp.GradScaler | None = None
    average: AveragedModel | None = None
    autocast: torch.dtype | None = None
    clip: float | None = None

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """Compute in `autocast`'s dtype where that is safe, within the context."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.engine.device_ids[0].type, self.autocast)


def train_epoch(
    training: Training, feed: Feed, criterion: nn.Module
) -> Iterator[tuple[StepReport, float]]:
    """Train to the end of the epoch; yield each step's report and learning rate once it is done."""
    batches, epoch = training.batches, training.batches.epoch
    training.engine.train()
    while batches.epoch == epoch:
        request, found = feed.take()
        images, labels = found.images, found.labels
        if not len(labels):
            # A rank takes part in every step: one without images (fewer rows than ranks, or all
            # of them broken) passes a black one, whose label the criterion ignores.
            images = torch.zeros(1, *feed.source.image_shape, dtype=torch.uint8)
            labels = torch.tensor([IGNORED_LABEL])
        training.optimizer.zero_grad()
        with training.precision():
            training.engine.forward_backward(images, labels, criterion, scaler=training.scaler)
        _update(training)
        rate = training.optimizer.param_groups[0]["lr"]
        batches.consumed += request.of
        training.scheduler.step()
        report = training.engine.last_step
        assert report is not None, "a step was made"
        yield report, rate


def _update(training: Training) -> None:
    """Take the optimizer's step, and what belongs to it."""
    optimizer, scaler, model = training.optimizer, training.scaler, training.engine.module
    if training.clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if training.average is not None:
        training.average.update_parameters(model)
