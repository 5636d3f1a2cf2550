"""A batch that grows with the gradient's noise scale: `--batch auto`.

While the batch is below the noise scale, twice the batch needs nearly half the steps (McCandlish
et al. 2018, arXiv:1812.06162). The scale rises in the course of training. So the batch starts
small and is doubled between epochs, in the spirit of Smith et al. 2018, arXiv:1711.00489. The
learning rate is scaled with it (Goyal et al. 2017, arXiv:1706.02677, section 2.1), and does not
depend on when it grows otherwise: its schedule goes by the images that were used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST = 256  # images; `--base-lr` is the rate for them
FEWEST_UPDATES = 8  # of an epoch; with fewer, training runs out of updates
_FEWEST_AVERAGED = 20


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
