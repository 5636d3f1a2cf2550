"""How good a model is on images that it was not trained on, and where it is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from scatterpar import ScatterOnceParallel
from scatterpar.train.data import Images
from scatterpar.train.feed import Feed
from scatterpar.train.loop import Training

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


def scored(engine: ScatterOnceParallel, feed: Feed, rows: int) -> Iterator[tuple[Images, Tensor]]:
    """Yield the images among the next rows that can be read; and their scores, on the host."""
    classes = len(feed.source.class_names)
    while rows:
        request, found = feed.take()
        rows -= len(request.rows)
        if len(found.labels):
            yield found, engine(found.images).float().cpu()[:, :classes]


@torch.no_grad()
def evaluate(
    training: Training, feed: Feed, between: Callable[[], None] = lambda: None
) -> Evaluation:
    """Test the model, or the average of its weights where that is kept; each rank its part.

    Args:
        training: has the model.
        feed: has the images; this rank's part of the test comes next.
        between: called after each batch.
    """
    classes, machines = len(feed.source.class_names), training.machines
    loss, among_five = 0.0, 0
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    worst: list[list[float]] = []
    training.engine.eval()
    rows = len(machines.share(torch.arange(len(feed.source.test))))
    with averaged(training.engine.module, training.average), training.precision():
        for found, scores in scored(training.engine, feed, rows):
            losses = F.cross_entropy(scores, found.labels, reduction="none")
            best = scores.topk(min(5, classes)).indices
            loss += float(losses.double().sum())
            among_five += int((best == found.labels[:, None]).sum())
            pairs = found.labels * classes + best[:, 0]
            confusion += pairs.bincount(minlength=classes**2).view(classes, classes)
            columns = torch.stack((losses, found.rows, found.labels, best[:, 0]), 1).double()
            wrong = columns[found.labels != best[:, 0]]
            wrong = wrong[wrong[:, 0].argsort(descending=True)[:_WORST]]
            worst = _worst([*worst, *wrong.tolist()])
            between()
    everyones = machines.everyones((loss, among_five, confusion, worst))
    all_losses, all_among_five, confusions, worsts = zip(*everyones, strict=True)
    confusion = torch.stack(confusions).sum(0)
    images = int(confusion.sum())
    return Evaluation(
        images=images,
        loss=sum(all_losses) / max(1, images),
        top1=int(confusion.diag().sum()) / max(1, images),
        top5=sum(all_among_five) / max(1, images),
        confusion=confusion,
        worst=[Mistake(m[0], *map(int, m[1:])) for m in _worst(chain(*worsts))],
    )


def _worst(mistakes: Iterable[list[float]]) -> list[list[float]]:
    return sorted(mistakes, key=lambda mistake: (-mistake[0], mistake[1]))[:_WORST]


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
    tensors = (chain(module.parameters(), module.buffers()) for module in (one, other))
    for a, b in zip(*tensors, strict=True):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
