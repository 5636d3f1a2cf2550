"""The collectives of a step: the small one says who failed and what numbers add up to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scatterpar.machines.waiting import waiting_for

__all__ = ["LAYOUT_BITS", "Collectives"]

LAYOUT_BITS = 20  # so that the sum of the squares of 8,192 ranks is exact in float64
_SUMS = 4  # numbers of which all ranks need the sum
_FLAGS = 48  # in a number: each rank adds a power of two of its own, exact in float64


class Collectives:
    """What the ranks of a group exchange, all of them each time.

    Args:
        group: kept by reference alone. Whoever holds a group keeps gloo's threads running after
            destroy_process_group, and those can abort an interpreter that ends:
            https://github.com/pytorch/pytorch/issues/190489
        control: where small tensors are exchanged.
    """

    def __init__(self, group: dist.ProcessGroup, control: torch.device) -> None:
        self._group = weakref.ref(group)
        self._control = control
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def agree(
        self, mine: Sequence[float], layout: int, number: int, otherwise: str
    ) -> tuple[list[float], list[int]]:
        """The sums over all ranks of ``mine``, and each rank's ``number``.

        Args:
            mine: four numbers.
            layout: an integer of ``LAYOUT_BITS`` that has to be the same on all ranks.
            number: this rank's own.
            otherwise: on what they disagree where it is not.

        Raises:
            RuntimeError: on every rank alike: one failed, or ``layout`` is not the same on all.
        """
        numbers = [0.0] * self.size
        numbers[self.rank] = number
        (layouts, squares, *values), failed = self._exchange(
            [layout, layout**2, *mine, *numbers], False
        )
        if failed:
            raise RuntimeError(
                f"rank {', '.join(map(str, failed))} of {self.size} failed in this step, so that "
                f"nothing was changed on any rank; see what it raised there"
            )
        if not _all_equal(int(layouts), int(squares), self.size):
            raise RuntimeError(
                f"the ranks disagree on {otherwise}; make the same changes and the same calls on "
                f"every rank"
            )
        return values[:_SUMS], [int(value) for value in values[_SUMS:]]

    def fail(self) -> list[int]:
        """Tell the other ranks, as they come to agree, that this one failed. Who else did."""
        _, failed = self._exchange([0.0] * (2 + _SUMS + self.size), True)
        return [rank for rank in failed if rank != self.rank]

    def sum(self, tensor: Tensor, what: str) -> None:
        """Give ``tensor`` the sum of all ranks' ones, in place; ``what`` it is, for errors."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the engine's process group is gone, by dist.destroy_process_group() perhaps; make "
                "a new group and a new engine"
            )
        with waiting_for(what, group, still="; nothing was changed on this rank"):
            dist.all_reduce(tensor, group=group)

    def _exchange(self, mine: Sequence[float], failed: bool) -> tuple[list[float], list[int]]:
        flags = [0.0] * -(-self.size // _FLAGS)
        flags[self.rank // _FLAGS] = failed * 2.0 ** (self.rank % _FLAGS)
        words = torch.tensor([*mine, *flags], dtype=torch.float64, device=self._control)
        self.sum(words, "the flags and counts of all ranks")
        values: list[float] = words.tolist()
        sums = [int(value) for value in values[len(mine) :]]
        those = [r for r in range(self.size) if sums[r // _FLAGS] >> (r % _FLAGS) & 1]
        return values[: len(mine)], those


def _all_equal(total: int, squares: int, count: int) -> bool:
    """Whether ``count`` integers with this sum, and this sum of squares, are all the same one.

    The mean of squares is the square of the mean exactly where nothing deviates from it.
    """
    return count * squares == total**2
