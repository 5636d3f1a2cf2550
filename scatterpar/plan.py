"""How many rows go where: rows -> shares -> micro-batches. Pure arithmetic, no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["Plan", "Share", "make_plan"]


@dataclass(frozen=True)
class Share:
    """The rows of the batch that one replica handles.

    ``start`` and ``stop`` are positions in the batch, and so are the pairs in
    ``micro_batches``: ``batch[start:stop]`` is what one sub-step works on.
    """

    replica: int
    device: torch.device
    start: int
    stop: int
    micro_batches: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """The number of rows of this share."""
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The shares and micro-batches for one batch. ``print(plan)`` shows a small table."""

    rows: int
    shares: tuple[Share, ...]

    def __str__(self) -> str:
        """One line a share: replica, device, rows, and how they are cut."""
        table = [("replica", "device", "rows", "micro-batches")]
        for share in self.shares:
            sizes = Counter(stop - start for start, stop in share.micro_batches)
            cut = " + ".join(f"{times} x {size}" for size, times in sizes.items())
            span = f"{share.start}:{share.stop}"
            table.append((str(share.replica), str(share.device), span, cut))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        replicas = "replica" if len(self.shares) == 1 else "replicas"
        return "\n".join([f"{self.rows} rows on {len(self.shares)} {replicas}", *lines])


def make_plan(
    rows: int,
    devices: Sequence[torch.device],
    accum: int = 1,
    micro_batch_size: int | None = None,
) -> Plan:
    """Split ``rows`` over ``devices`` and each share into micro-batches, as evenly as possible.

    Sizes differ by at most one, larger pieces first, and no piece is empty: with fewer
    rows than replicas (or than ``accum``), fewer are used.

    Args:
        rows: size of the batch, at least 1.
        devices: one entry per replica; entries may repeat.
        accum: sub-steps per replica.
        micro_batch_size: most rows per sub-step; overrides ``accum`` where given.

    Raises:
        TypeError: ``rows`` is not an integer.
        ValueError: ``rows`` is less than 1.

    >>> cpu = torch.device("cpu")
    >>> [share.rows for share in make_plan(9, [cpu] * 4).shares]
    [3, 2, 2, 2]
    >>> make_plan(9, [cpu], micro_batch_size=4).shares[0].micro_batches
    ((0, 3), (3, 6), (6, 9))
    """
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise TypeError(f"rows must be an int, got {rows!r}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}: an empty batch has no plan")
    shares = []
    for replica, (start, stop) in enumerate(_cut(0, rows, len(devices))):
        pieces = accum if micro_batch_size is None else -(-(stop - start) // micro_batch_size)
        shares.append(Share(replica, devices[replica], start, stop, _cut(start, stop, pieces)))
    return Plan(rows, tuple(shares))


def _cut(start: int, stop: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """Cut ``start:stop`` into at most ``pieces`` non-empty spans, the longer ones first."""
    pieces = min(pieces, stop - start)
    size, longer = divmod(stop - start, pieces)
    ends = [start + i * size + min(i, longer) for i in range(pieces + 1)]
    return tuple(pairwise(ends))
