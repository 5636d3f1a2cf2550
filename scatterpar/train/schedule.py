"""What a run does when: which images it will want, and how its learning rate moves."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, MultiStepLR

from scatterpar.recipe import gradual_warmup
from scatterpar.train.evaluation import rows_to_test
from scatterpar.train.feed import Request
from scatterpar.train.growth import FIRST
from scatterpar.train.loop import Batches
from scatterpar.train.machines import Machines
from scatterpar.train.source import TEST, TRAIN


def is_tested(finished: int, epochs: int, every: int) -> bool:
    """Whether the model is tested after so many epochs: every so many, and at the end.

    >>> [finished for finished in range(1, 8) if is_tested(finished, epochs=7, every=3)]
    [3, 6, 7]
    """
    return finished % every == 0 or finished == epochs


def foresee(
    batches: Batches,
    ended: int,
    epochs: int,
    every: int,
    test_images: int,
    tested_together: int,
    machines: Machines,
) -> Iterator[Request]:
    """Yield what this rank will want from here to the end of the run, in order.

    Args:
        batches: where the run is; left alone.
        ended: epochs that are done with, their tests included.
        epochs: of the whole run.
        every: epochs between tests.
        test_images: how many there are.
        tested_together: how many of them are tested at once.
        machines: the ranks, of which this is one.
    """
    ahead = copy.copy(batches)
    while True:
        if ended < ahead.epoch:
            if is_tested(ahead.epoch, epochs, every):
                for rows in rows_to_test(test_images, tested_together, machines):
                    yield Request(TEST, rows)
            ended = ahead.epoch
        epoch = ahead.epoch
        if epoch >= epochs:
            return
        for rows in ahead.rest_of_epoch():
            mine = machines.share(rows)
            if len(mine):
                yield Request(TRAIN, mine, epoch)
            ahead.consumed += len(rows)


def make_scheduler(
    optimizer: Optimizer, steps: int, warmup_steps: int, drops: Sequence[int] = ()
) -> LRScheduler:
    """A gradual warm-up to the rate that the optimizer has; then a cosine to zero, or drops.

    Args:
        optimizer: has the rate to reach.
        steps: of the whole run.
        warmup_steps: until the rate is reached.
        drops: steps at which the rate falls to a tenth, in place of the cosine; after the
            warm-up.
    """
    peak = float(optimizer.param_groups[0]["lr"])
    rest: LRScheduler
    if drops:
        rest = MultiStepLR(optimizer, [step - warmup_steps for step in drops])
    else:
        rest = CosineAnnealingLR(optimizer, steps - warmup_steps)
    if not warmup_steps:
        return rest
    return gradual_warmup(optimizer, warmup_steps, peak / (warmup_steps + 1), rest)


def make_growing_scheduler(
    optimizer: Optimizer,
    batches: Batches,
    epochs: int,
    warmup_epochs: int,
    drops: Sequence[int] = (),
) -> LRScheduler:
    """The same by the share of images that were used, scaled with the batch: for one that grows.

    Its rate is that of where `batches` is, however often it was stepped.

    Args:
        optimizer: has the rate for batches of `FIRST` images.
        batches: where the run is, and how large a batch is now.
        epochs: of the whole run.
        warmup_epochs: until the rate is reached.
        drops: epochs after which the rate falls to a tenth, in place of the cosine.
    """

    def factor(_: int) -> float:
        scale, done = batches.batch / FIRST, batches.consumed / batches.rows
        if done < warmup_epochs:
            step = batches.batch / batches.rows
            return scale * (done + step) / (warmup_epochs + step)
        if drops:
            return scale * 0.1 ** sum(done >= drop for drop in drops)
        part = (done - warmup_epochs) / (epochs - warmup_epochs)
        return scale * 0.5 * (1 + math.cos(math.pi * part))

    return LambdaLR(optimizer, factor)
