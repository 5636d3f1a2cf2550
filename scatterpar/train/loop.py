"""The training loop: what a user of the engine writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from scatterpar.engine import ScatterOnceParallel
from scatterpar.report import StepReport
from scatterpar.train.data import Dataset
from scatterpar.train.machines import Machines
from scatterpar.train.split import Split

IGNORED_LABEL = -100  # the `ignore_index` of torch's own losses


class Batches:
    """The order in which the training rows are used, and how far it has come.

    Each epoch is a new random order of all rows, decided by `seed` and the epoch's number
    alone; its last batch has what is left. `consumed`, the samples used so far, is the whole
    state; whoever uses a batch adds its rows to it.

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
        # A seed of 32 bits made of both numbers: torch's CPU generator ignores higher bits.
        seed = random.Random(f"{self.seed} {epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.rows, generator=generator)


@dataclass(frozen=True)
class Training:
    """Everything that changes while training, in one place."""

    engine: ScatterOnceParallel
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: Batches
    machines: Machines = field(default_factory=Machines)
    scaler: torch.amp.GradScaler | None = None


def train_epoch(
    training: Training, data: Dataset, criterion: nn.Module
) -> Iterator[tuple[StepReport, float]]:
    """Train to the end of the epoch; yield each step's report and learning rate once it is done."""
    training.engine.train()
    for rows in training.batches.rest_of_epoch():
        images, labels = _share(training.machines, rows, data)
        training.optimizer.zero_grad()
        training.engine.forward_backward(images, labels, criterion, scaler=training.scaler)
        if training.scaler is None:
            training.optimizer.step()
        else:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        rate = training.optimizer.param_groups[0]["lr"]
        training.scheduler.step()
        training.batches.consumed += len(rows)
        report = training.engine.last_step
        assert report is not None, "a step was made"
        yield report, rate


def _share(machines: Machines, rows: Tensor, data: Dataset) -> tuple[Tensor, Tensor]:
    """Return this rank's images and labels of a batch.

    A rank takes part in every step: where a batch has fewer rows than there are ranks, those
    without one pass an image whose label the criterion ignores, which adds nothing.
    """
    mine = machines.share(rows)
    if len(mine):
        return data.standardise(data.train.images[mine]), data.train.labels[mine]
    filler = rows[:1]
    ignored = torch.full_like(data.train.labels[filler], IGNORED_LABEL)
    return data.standardise(data.train.images[filler]), ignored


@torch.no_grad()
def evaluate(
    engine: ScatterOnceParallel,
    data: Dataset,
    split: Split,
    batch: int,
    criterion: nn.Module,
    machines: Machines | None = None,
) -> tuple[float, float]:
    """Compute the mean loss and the share of right answers over a split, each rank its part."""
    machines = Machines() if machines is None else machines
    engine.eval()
    loss, right = 0.0, 0
    mine = machines.share(torch.arange(len(split)))
    for rows in torch.split(mine, -(-batch // machines.size)) if len(mine) else ():
        images, labels = split.images[rows], split.labels[rows]
        scores = engine(data.standardise(images)).cpu()
        loss += criterion(scores, labels).item() * len(labels)
        right += int((scores.argmax(dim=1) == labels).sum())
    loss, answers = machines.sum(loss, right)
    return loss / len(split), answers / len(split)
