"""How good a model is on images that it was not trained on, and where it is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from scatterpar.train.data import TEST
from scatterpar.train.feed import Feed
from scatterpar.train.loop import Training
from scatterpar.train.machines import Machines
from scatterpar.train.schedule import rows_to_test

_WORST = 24  # mistakes that are kept


class Mistake(NamedTuple):
    """A test image that was taken for something else; the loss says how surely."""

    loss: float
    row: int
    label: int
    predicted: int


@dataclass(frozen=True)
class Evaluation:
    """What was found on the test images.

    Attributes:
        images: how many there were.
        loss: the mean cross entropy.
        top1: share of images whose label has the highest score.
        top5: share of images whose label has one of the five highest scores.
        confusion: how often each label (row) was taken for each class (column): int64.
        worst: the mistakes with the highest loss, in that order.
    """

    images: int
    loss: float
    top1: float
    top5: float
    confusion: Tensor
    worst: list[Mistake]


@torch.no_grad()
def evaluate(
    training: Training, feed: Feed, batch: int, between: Callable[[], None] = lambda: None
) -> Evaluation:
    """Test the model, or the average of its weights where that is kept; each rank its part.

    Args:
        training: has the model.
        feed: has the images.
        batch: how many of them are tested at once.
        between: called after each batch.
    """
    classes = len(feed.source.class_names)
    loss, right, right5, images = 0.0, 0, 0, 0
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    worst: list[Mistake] = []
    training.engine.eval()
    with averaged(training.engine.module, training.average):
        for rows in rows_to_test(len(feed.source.test), batch, training.machines):
            found = feed.batch(TEST, rows)
            if not len(found.labels):
                continue
            with training.precision():
                scores = training.engine(found.images)
            scores, labels = scores.float().cpu()[:, :classes], found.labels
            losses = F.cross_entropy(scores, labels, reduction="none")
            best = scores.topk(min(5, classes)).indices
            hits = best == labels[:, None]
            loss += float(losses.double().sum())
            right += int(hits[:, 0].sum())
            right5 += int(hits.sum())
            images += len(labels)
            pairs = labels * classes + best[:, 0]
            confusion += pairs.bincount(minlength=classes**2).view(classes, classes)
            worst = _worst([*worst, *_mistakes(losses, found.rows, labels, best[:, 0])])
            between()
    return _together(training.machines, loss, right, right5, images, confusion, worst)


@contextlib.contextmanager
def averaged(model: nn.Module, average: AveragedModel | None) -> Iterator[None]:
    """Let a model have the average's weights and buffers within the context."""
    if average is not None:
        _exchange(model, average.module)
    try:
        yield
    finally:
        if average is not None:
            _exchange(model, average.module)


@torch.no_grad()
def _exchange(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(
        chain(one.parameters(), one.buffers()),
        chain(other.parameters(), other.buffers()),
        strict=True,
    )
    for a, b in pairs:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


def _mistakes(losses: Tensor, rows: Tensor, labels: Tensor, predicted: Tensor) -> list[Mistake]:
    wrong = (labels != predicted).nonzero().flatten()
    wrong = wrong[losses[wrong].argsort(descending=True)[:_WORST]]
    columns = (losses[wrong], rows[wrong], labels[wrong], predicted[wrong])
    return [Mistake(*entry) for entry in zip(*(c.tolist() for c in columns), strict=True)]


def _worst(mistakes: list[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: (-mistake.loss, mistake.row))[:_WORST]


def _together(
    machines: Machines,
    loss: float,
    right: int,
    right5: int,
    images: int,
    confusion: Tensor,
    worst: list[Mistake],
) -> Evaluation:
    """Put together what the ranks have found."""
    everyones = machines.everyones(
        (loss, right, right5, images, confusion, [tuple(mistake) for mistake in worst])
    )
    losses, rights, rights5, counts, confusions, worsts = zip(*everyones, strict=True)
    total = max(1, sum(counts))
    return Evaluation(
        images=sum(counts),
        loss=sum(losses) / total,
        top1=sum(rights) / total,
        top5=sum(rights5) / total,
        confusion=torch.stack(confusions).sum(0),
        worst=_worst([Mistake(*mistake) for part in worsts for mistake in part]),
    )
