"""The training loop: what a user of the engine writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from scatterpar.engine import ScatterOnceParallel
from scatterpar.report import StepReport
from scatterpar.train.data import Dataset
from scatterpar.train.split import Split


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


def train_epoch(
    training: Training, data: Dataset, criterion: nn.Module
) -> Iterator[tuple[StepReport, float]]:
    """Train to the end of the epoch; yield each step's report and learning rate once it is done."""
    training.engine.train()
    for rows in training.batches.rest_of_epoch():
        images = data.standardise(data.train.images[rows])
        labels = data.train.labels[rows]
        training.optimizer.zero_grad()
        training.engine.forward_backward(images, labels, criterion)
        training.optimizer.step()
        rate = training.optimizer.param_groups[0]["lr"]
        training.scheduler.step()
        training.batches.consumed += len(rows)
        report = training.engine.last_step
        assert report is not None, "a step was made"
        yield report, rate


@torch.no_grad()
def evaluate(
    engine: ScatterOnceParallel, data: Dataset, split: Split, batch: int, criterion: nn.Module
) -> tuple[float, float]:
    """Compute the mean loss and the share of right answers over a split."""
    engine.eval()
    loss, right = 0.0, 0
    for rows in torch.split(torch.arange(len(split)), batch):
        images, labels = split.images[rows], split.labels[rows]
        scores = engine(data.standardise(images)).cpu()
        loss += criterion(scores, labels).item() * len(labels)
        right += int((scores.argmax(dim=1) == labels).sum())
    return loss / len(split), right / len(split)
