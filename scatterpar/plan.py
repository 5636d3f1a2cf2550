"""How many rows go where: arithmetic, no tensors. ::

rows                 9                       on two replicas, with accum=2
shares               0:5          5:9
micro-batches        0:3 3:5      5:7 7:9
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch

from scatterpar.option_checks import check_int
from scatterpar.spans import cut_span, divide
from scatterpar.tables import Printed, as_text

_Value = TypeVar("_Value")
# Smaller fractions of a sub-step come from the rounding of ``shares``.
_ROUNDING_OF_SHARES = Fraction(1, 10**9)


@dataclass(frozen=True)
class Share:
    """The rows of the batch that one replica handles.

    Several batches (``Rows.from_batches``) count as one: rows between ``start`` and
    ``stop`` may belong to other shares.

    Attributes:
        replica: the number of the replica.
        device: where it computes.
        micro_batches: for each sub-step the start and stop of its rows.
    """

    replica: int
    device: torch.device
    micro_batches: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        """The first row of the share."""
        return self.micro_batches[0][0]

    @property
    def stop(self) -> int:
        """The end of the last row of the share."""
        return self.micro_batches[-1][1]

    @cached_property
    def rows(self) -> int:
        """The number of rows of this share."""
        return sum(self.substep_rows)

    @cached_property
    def substep_rows(self) -> tuple[int, ...]:
        """The number of rows of each sub-step."""
        return tuple(stop - start for start, stop in self.micro_batches)

    def rows_of(self, sub_step: int) -> range:
        """The numbers, in the batch, of the rows of one sub-step."""
        return range(*self.micro_batches[sub_step])

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The micro-batches, merged if they touch."""
        spans: list[tuple[int, int]] = []
        for start, stop in self.micro_batches:
            if spans and spans[-1][1] == start:
                start, _ = spans.pop()
            spans.append((start, stop))
        return tuple(spans)


@dataclass(frozen=True)
class Plan(Printed):
    """The shares and micro-batches for one batch.

    ``print(plan)`` shows a small table.

    Attributes:
        rows: the number of rows in the batch.
        shares: one per replica that has rows.
    """

    rows: int
    shares: tuple[Share, ...]

    @cached_property
    def substep_rows(self) -> tuple[int, ...]:
        """The number of rows of each sub-step, share by share."""
        return tuple(chain.from_iterable(share.substep_rows for share in self.shares))

    def by_rows(self, values: Iterable[Sequence[_Value]]) -> list[_Value]:
        """Values of the micro-batches of each share, in the order of the rows.

        With several batches (``Rows.from_batches``) the shares of replicas alternate.
        """
        pieces: list[tuple[tuple[int, int], _Value]] = []
        for share, values_of_share in zip(self.shares, values, strict=True):
            pieces += zip(share.micro_batches, values_of_share, strict=True)
        return [value for _, value in sorted(pieces, key=itemgetter(0))]

    def in_one_pass(self) -> Plan:
        """The same shares of one batch, each with a single sub-step."""
        shares: list[Share] = []
        for share in self.shares:
            shares.append(replace(share, micro_batches=((share.start, share.stop),)))
        return replace(self, shares=tuple(shares))

    def rows_of(self, replica: int, sub_step: int) -> range:
        """The numbers, in the batch, of the rows of one sub-step.

        All numbers count from 0.
        """
        return self.shares[replica].rows_of(sub_step)

    def __str__(self) -> str:
        """A table with one line per share: where it is, its rows and micro-batches."""
        table = [("replica", "device", "rows", "micro-batches")]
        for share in self.shares:
            # In the order of the micro-batches: the larger size first.
            sizes = Counter(share.substep_rows)
            cuts = [f"{count} x {size}" for size, count in sizes.items()]
            spans = [f"{start}:{stop}" for start, stop in share.spans]
            where = str(share.replica), str(share.device)
            table.append((*where, ", ".join(spans), " + ".join(cuts)))
        replicas = "replica" if len(self.shares) == 1 else "replicas"
        title = f"{self.rows} rows on {len(self.shares)} {replicas}"
        return f"{title}\n{as_text(table, str.ljust)}"


def make_plan(
    rows: int | Sequence[int],
    devices: Sequence[torch.device],
    accum: int = 1,
    micro_batch_size: int | Sequence[int] | None = None,
    shares: Sequence[float] | None = None,
) -> Plan:
    """Split ``rows`` over ``devices``, and each share into micro-batches.

    As evenly as possible. Sizes differ by at most one, larger pieces come first, and no
    piece is empty: with fewer rows than replicas (or than ``accum``), fewer are used.
    With ``shares`` the rows are divided in proportion, with a difference of less than
    one row. A larger share is cut into more micro-batches, not into larger ones:
    ``accum`` times its size relative to an equal share, rounded up.
    ``micro_batch_size`` may be a list with one number per replica.

    >>> cpu = torch.device("cpu")
    >>> [share.rows for share in make_plan(9, [cpu] * 4).shares]
    [3, 2, 2, 2]
    >>> make_plan(9, [cpu], micro_batch_size=4).shares[0].micro_batches
    ((0, 3), (3, 6), (6, 9))
    >>> [share.rows for share in make_plan(9, [cpu] * 2, shares=[3, 1]).shares]
    [7, 2]
    >>> [share.micro_batches for share in make_plan([4, 3], [cpu] * 2).shares]
    [((0, 2), (4, 6)), ((2, 4), (6, 7))]
    """
    sizes = tuple(rows) if isinstance(rows, (tuple, list)) else (rows,)
    for size in sizes:
        check_int("rows", size, least=1)
    limits = (micro_batch_size,) * len(devices)
    if isinstance(micro_batch_size, (list, tuple)):
        limits = tuple(micro_batch_size)
    if shares is None:
        shares = (1.0,) * len(devices)
    return _plan(sizes, tuple(devices), accum, limits, tuple(shares))


@lru_cache(maxsize=64)  # training uses the same plan in every step
def _plan(
    sizes: tuple[int, ...],
    devices: tuple[torch.device, ...],
    accum: int,
    limits: tuple[Any, ...],
    shares: tuple[float, ...],
) -> Plan:
    exact = list(map(Fraction, shares))  # rounding cannot change a plan
    parts = [share / sum(exact) for share in exact]
    # A share that is larger than an equal one has more sub-steps, not larger ones.
    equal = [accum * len(parts) * part for part in parts]
    substeps = [max(1, math.ceil(number - _ROUNDING_OF_SHARES)) for number in equal]
    micro_batches: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by replica
    first = 0  # the number of the batch's first row
    for rows in sizes:
        for replica, (start, stop) in enumerate(divide(rows, parts)):
            pieces = substeps[replica]
            if limits[replica] is not None:
                pieces = math.ceil(Fraction(stop - start, limits[replica]))
            micro_batches[replica] += cut_span(first + start, first + stop, pieces)
        first += rows
    planned = [
        Share(replica, devices[replica], tuple(spans))
        for replica, spans in micro_batches.items()
    ]
    return Plan(first, tuple(planned))


def rounds_of(threads: Sequence[int]) -> list[int]:
    """For each replica the number of earlier replicas in its thread.

    >>> rounds_of([0, 0, 2, 2])
    [0, 1, 0, 1]
    """
    seen: Counter[int] = Counter()
    rounds: list[int] = []
    for thread in threads:
        rounds.append(seen[thread])
        seen[thread] += 1
    return rounds
