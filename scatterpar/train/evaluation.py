"""How good a model is on images that it was not trained on, and where it is wrong."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
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
from scatterpar.train.training import Training

_WORST = 24  # mistakes that are kept


class Mistake(NamedTuple):
    """A test image that was taken for something else; the loss says how surely."""

    loss: float
    row: int
    label: int
    predicted: int


@dataclass(frozen=True)
class Evaluation:
    """What was found on the test images; the mistakes with the highest loss come first."""

    images: int
    loss: float
    top1: float
    top5: float
    confusion: Tensor
    worst: list[Mistake]


def scored(engine: ScatterOnceParallel, feed: Feed, rows: int) -> Iterator[tuple[Images, Tensor]]:
    """Yield the images among the next rows that can be read; and their scores, on the host."""
    while rows:
        request, found = feed.take()
        rows -= len(request.rows)
        if len(found.labels):
            yield found, engine(found.images).float().cpu()[:, : len(feed.source.class_names)]


@torch.no_grad()
def evaluate(
    training: Training, feed: Feed, between: Callable[[], None] = lambda: None
) -> Evaluation:
    """Test the model, or the average of its weights where that is kept; each rank its part.

    The feed has this rank's images next. `between` is called after each batch.
    """
    classes, machines, engine = len(feed.source.class_names), training.machines, training.engine
    tables = [torch.empty(0, 5, dtype=torch.float64)]
    engine.eval()
    rows = len(machines.share(torch.arange(len(feed.source.test))))
    with _averaged(engine.module, training.average), training.precision():
        for found, scores in scored(engine, feed, rows):
            losses = F.cross_entropy(scores, found.labels, reduction="none")
            best = scores.topk(min(5, classes)).indices
            among = (best == found.labels[:, None]).any(1)
            columns = losses.double(), found.rows, found.labels, best[:, 0], among
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


@contextlib.contextmanager
def _averaged(model: nn.Module, average: AveragedModel | None) -> Iterator[None]:
    """Let a model have the average's weights and buffers within the context."""
    if average is None:
        yield
        return
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(average.module.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(kept)
