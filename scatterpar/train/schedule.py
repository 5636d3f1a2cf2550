"""What a run does when: the images it will want, its learning rate, and how its batch grows.

While the batch is below the gradient's noise scale, twice the batch needs nearly half the steps
(McCandlish et al. 2018, arXiv:1812.06162), and the scale rises in the course of training. So with
`--batch auto` the batch starts small and is doubled between epochs, in the spirit of Smith et al.
2018, arXiv:1711.00489. The learning rate is scaled with it (Goyal et al. 2017, arXiv:1706.02677,
section 2.1); otherwise it goes by the images that were used, and ends at the same place whenever
the batch grew. Schedulers of libraries go by steps or epochs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scatterpar.train.data import TEST, TRAIN
from scatterpar.train.feed import Request
from scatterpar.train.loop import Batches
from scatterpar.train.machines import Machines

FIRST = 256  # images; `--base-lr` is the rate for them
FEWEST_UPDATES = 8  # of an epoch; with fewer, training runs out of updates
_FEWEST_AVERAGED = 20


def foresee(
    batches: Batches,
    ended: int,
    epochs: int,
    test_images: int,
    tested_together: int,
    machines: Machines,
) -> Iterator[Request]:
    """Yield what this rank wants from here to the end of the run, in order.

    Args:
        batches: where the run is; left alone.
        ended: epochs that are done with, their tests included.
        epochs: of the whole run.
        test_images: how many there are.
        tested_together: how many of them are tested at once.
        machines: the ranks, of which this is one.
    """
    ahead, together = copy.copy(batches), -(-tested_together // machines.size)
    while True:
        epoch = ahead.epoch
        if ended < epoch:
            mine = machines.share(torch.arange(test_images))
            for start in range(0, len(mine), together):
                yield Request(TEST, mine[start : start + together])
        ended = epoch
        if epoch >= epochs:
            return
        for rows in ahead.rest_of_epoch():
            yield Request(TRAIN, machines.share(rows), epoch, len(rows))
            ahead.consumed += len(rows)


def make_scheduler(
    optimizer: Optimizer,
    batches: Batches,
    epochs: int,
    warmup_epochs: int,
    drops: Sequence[int] = (),
) -> LRScheduler:
    """A gradual warm-up; then a cosine to zero, or drops. All of it scaled with the batch.

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


def averaging(steps_per_epoch: int) -> float:
    """Return the decay of a `NoiseScale` that averages over about an epoch, or 20 steps if more.

    While the batch is much smaller than the noise scale, a step tells little about it.

    >>> averaging(235), averaging(8)
    (0.9957446808510638, 0.95)
    """
    return 1 - 1 / max(_FEWEST_AVERAGED, steps_per_epoch)


@dataclass(frozen=True)
class Growth:
    """The sizes that a batch may have, the smallest first, and when it takes the next one.

    >>> growth = Growth.up_to(60_000)
    >>> growth.sizes
    (256, 512, 1024, 2048, 4096)
    >>> growth.after(256, scale=300.0), growth.after(256, scale=9000.0), growth.after(4096, 9000.0)
    (256, 512, 4096)
    """

    sizes: tuple[int, ...]

    @classmethod
    def up_to(cls, images: int, fits: Callable[[int], bool] = lambda batch: True) -> Growth:
        """Double `FIRST` as long as an epoch of so many images keeps `FEWEST_UPDATES` updates.

        With fewer images than `FIRST` there is one size: all of them.

        Args:
            images: to train on.
            fits: tells whether the work can be divided for a size; the others are left out.
        """
        doubled = [min(FIRST, images)]
        while 2 * doubled[-1] * FEWEST_UPDATES <= images:
            doubled.append(2 * doubled[-1])
        return cls((doubled[0], *filter(fits, doubled[1:])))

    def after(self, batch: int, scale: float) -> int:
        """Return the next size if the noise scale, in images, reaches it; else the same."""
        larger = next((size for size in self.sizes if size > batch), batch)
        return larger if larger <= scale < float("inf") else batch
