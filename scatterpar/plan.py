"""How many rows go where: rows -> shares -> micro-batches. Pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch

_REMEMBERED = 5  # speeds per device; their median is used, so one slow step changes nothing
_WORTHWHILE = 1.05  # new shares must make the step this much faster
_ROUNDING = Fraction(1, 10**9)  # of a sub-step; smaller fractions come from float rounding
_SHOWN = 72  # characters of a share's row numbers in a table


@dataclass(frozen=True)
class Share:
    """The rows of the batch that one replica handles.

    ``start``, ``stop`` and the pairs in ``micro_batches`` count rows in the order of the plan.
    Without costs that is the order of the batch: a sub-step computes ``batch[start:stop]`` of its
    pair. If micro-batches are cut by cost, the plan counts replica by replica, and ``row_numbers``
    has, for each micro-batch, the numbers of its rows in the batch, in ascending order.

    If the batch consists of several (``Rows.from_batches``), positions count through all of them,
    one after the other, and a share has some rows of each. Rows between ``start``, its first row,
    and ``stop``, the row after its last, may belong to other shares.
    """

    replica: int
    device: torch.device
    start: int
    stop: int
    micro_batches: tuple[tuple[int, int], ...]
    row_numbers: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def rows(self) -> int:
        """The number of rows of this share."""
        return sum(stop - start for start, stop in self.micro_batches)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The micro-batches, merged if they touch: one pair of start and stop for a single batch.

        Micro-batches that are cut by cost are not merged, because their rows are not consecutive.
        """
        if self.row_numbers:
            return self.micro_batches
        spans: list[tuple[int, int]] = []
        for start, stop in self.micro_batches:
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        return tuple(spans)


@dataclass(frozen=True)
class Plan:
    """The shares and micro-batches for one batch. ``print(plan)`` shows a small table.

    ``costs`` has one number per row if micro-batches are cut by cost.
    """

    rows: int
    shares: tuple[Share, ...]
    costs: tuple[float, ...] = ()

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The number of the batch's row at each position of the plan; empty without costs."""
        return tuple(row for share in self.shares for rows in share.row_numbers for row in rows)

    @cached_property
    def substep_rows(self) -> tuple[int, ...]:
        """The number of rows of each sub-step, share by share."""
        return tuple(stop - start for share in self.shares for start, stop in share.micro_batches)

    def rows_of(self, replica: int, sub_step: int) -> Sequence[int]:
        """The numbers, in the batch, of the rows of one sub-step. All numbers count from 0."""
        share = self.shares[replica]
        if share.row_numbers:
            return share.row_numbers[sub_step]
        return range(*share.micro_batches[sub_step])

    def load_of(self, share: Share) -> float:
        """The load of a replica: its number of rows, or the padded cost of its micro-batches.

        The padded cost of a micro-batch is its number of rows times the largest cost of these rows.
        """
        if not self.costs:
            return share.rows
        return sum(len(rows) * max(self.costs[row] for row in rows) for rows in share.row_numbers)

    def __str__(self) -> str:
        """A table with one line per share: replica, device, rows, sizes of micro-batches."""
        if self.costs:
            return self._by_cost()
        table = [("replica", "device", "rows", "micro-batches")]
        for share in self.shares:
            sizes = Counter(stop - start for start, stop in share.micro_batches)
            cut = " + ".join(f"{times} x {size}" for size, times in sizes.items())
            span = ", ".join(f"{start}:{stop}" for start, stop in share.spans)
            table.append((str(share.replica), str(share.device), span, cut))
        return self._printed(table)

    def _by_cost(self) -> str:
        """A table with one line per share: cost without and with padding, rows per sub-step."""
        loads = [self.load_of(share) for share in self.shares]
        padded, cost = sum(loads), sum(self.costs)
        heads = "replica", "device", "rows", "cost", "padded", "load", "sub-steps", "rows of each"
        table = [heads]
        for share, load in zip(self.shares, loads, strict=True):
            cost_of_rows = sum(self.costs[row] for rows in share.row_numbers for row in rows)
            part = f"{load / padded:.1%}" if padded else "-"
            numbers = f"{share.rows}", f"{cost_of_rows:,.6g}", f"{load:,.6g}", part
            each = " + ".join(str([*rows]) for rows in share.row_numbers)
            each = each if len(each) <= _SHOWN else each[:_SHOWN].rpartition(",")[0] + ", ..."
            substeps = str(len(share.row_numbers))
            table.append((str(share.replica), str(share.device), *numbers, substeps, each))
        more = f" ({padded / cost - 1:.1%} more)" if cost else ""
        return self._printed(table, f", by cost: {cost:,.6g}, with padding {padded:,.6g}{more}")

    def _printed(self, table: Sequence[Sequence[str]], more: str = "") -> str:
        replicas = "replica" if len(self.shares) == 1 else "replicas"
        title = f"{self.rows} rows on {len(self.shares)} {replicas}{more}"
        return f"{title}\n{as_text(table, str.ljust)}"


def as_text(table: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.rjust) -> str:
    """Rows of cells as lines of text. The first column is aligned left, the others by ``align``."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])]).rstrip()
        for row in table
    )


def make_plan(
    rows: int | Sequence[int],
    devices: Sequence[torch.device],
    accum: int = 1,
    micro_batch_size: int | None = None,
    shares: Sequence[float] | None = None,
) -> Plan:
    """Split ``rows`` over ``devices`` and each share into micro-batches, as evenly as possible.

    Sizes differ by at most one, larger pieces come first, and no piece is empty. If there are fewer
    rows than replicas (or than ``accum``), fewer are used.

    With ``shares`` the rows are divided in proportion, with a difference of less than one row. A
    larger share is cut into more micro-batches, not into larger ones. Their number is ``accum``
    times the share's size relative to an equal share, rounded up, so no micro-batch has more rows
    than with equal shares.

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
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"rows must be an int, got {size!r}")
        if size < 1:
            raise ValueError(f"rows must be at least 1, got {size}: an empty batch has no plan")
    relative = None if shares is None else tuple(shares)
    return _plan(sizes, tuple(devices), accum, micro_batch_size, relative)


@lru_cache(maxsize=64)  # training uses the same plan in every step
def _plan(
    sizes: tuple[int, ...],
    devices: tuple[torch.device, ...],
    accum: int,
    micro_batch_size: int | None,
    shares: tuple[float, ...] | None,
) -> Plan:
    cuts: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by replica
    first = 0
    for rows in sizes:
        if shares is None or len(set(shares)) == 1:
            spans, substeps = _cut(0, rows, len(devices)), [accum] * len(devices)
        else:
            spans, substeps = _divide(rows, shares), _in_proportion(accum, shares)
        for replica, (start, stop) in enumerate(spans):
            pieces = substeps[replica]
            if micro_batch_size is not None:
                pieces = -(-(stop - start) // micro_batch_size)
            cuts[replica] += _cut(first + start, first + stop, pieces)
        first += rows
    planned = (
        Share(replica, devices[replica], spans[0][0], spans[-1][1], tuple(spans))
        for replica, spans in cuts.items()
    )
    return Plan(first, tuple(planned))


def _divide(rows: int, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Spans in proportion to ``shares``: first whole rows, then the largest remainders.

    Every replica gets at least one row; with fewer rows than replicas, the first get one each.
    """
    if rows <= len(shares):
        return tuple((i, i + 1) for i in range(rows))
    quotas = [rows * part for part in _fractions(shares)]
    sizes = [max(1, int(quota)) for quota in quotas]
    while sum(sizes) < rows:
        behind = max(range(len(sizes)), key=lambda i: quotas[i] - sizes[i])
        sizes[behind] += 1
    while sum(sizes) > rows:
        ahead = max(range(len(sizes)), key=lambda i: (sizes[i] > 1, sizes[i] - quotas[i]))
        sizes[ahead] -= 1
    ends = [0, *accumulate(sizes)]
    return tuple(pairwise(ends))


def _in_proportion(accum: int, shares: Sequence[float]) -> list[int]:
    """The number of sub-steps per replica: ``accum`` for an equal share, otherwise rounded up."""
    exact = [accum * len(shares) * part for part in _fractions(shares)]
    return [max(1, math.ceil(number - _ROUNDING)) for number in exact]


def _fractions(shares: Sequence[float]) -> list[Fraction]:
    """Each share as an exact fraction of the sum, so that rounding cannot change a plan."""
    exact = [Fraction(share) for share in shares]
    total = sum(exact)
    return [share / total for share in exact]


def _cut(start: int, stop: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """Cut ``start:stop`` into at most ``pieces`` non-empty spans, the longer ones first."""
    pieces = min(pieces, stop - start)
    size, longer = divmod(stop - start, pieces)
    ends = [start + i * size + min(i, longer) for i in range(pieces + 1)]
    return tuple(pairwise(ends))


class ShareBalancer:
    """The relative sizes of the replicas' shares, passed by the user or learned from speeds.

    The speed of a device is its load (rows, or their padded cost) per second in one step, from the
    first start to the last end of its replicas.
    """

    def __init__(self, shares: Any, device_ids: Sequence[torch.device]) -> None:
        self._device_ids = tuple(device_ids)
        self.learns = isinstance(shares, str) and shares == "auto"
        self._rows_per_second: dict[torch.device, deque[float]] = {}
        user_shares = None if self.learns else shares
        self.shares = _checked(user_shares, len(device_ids)) or (1.0,) * len(device_ids)

    def observe(
        self, plan: Plan, replica_spans: Sequence[Mapping[int, tuple[float, float]]]
    ) -> None:
        """Learn from a committed step; a device's first step is ignored: it has one-time work."""
        if not self.learns:
            return
        for device in {share.device for share in plan.shares}:
            on_device = [share for share in plan.shares if share.device == device]
            seconds = 0.0
            for spans in replica_spans:
                starts, ends = zip(*(spans[share.replica] for share in on_device), strict=True)
                seconds += max(ends) - min(starts)
            if device in self._rows_per_second:
                load = sum(map(plan.load_of, on_device))
                self._rows_per_second[device].append(load / max(seconds, 1e-9))
            else:
                self._rows_per_second[device] = deque(maxlen=_REMEMBERED)
        if all(self._rows_per_second.get(device) for device in self._device_ids):
            self._adapt()

    def _adapt(self) -> None:
        """Set the shares in proportion to the devices' speeds, if the gain is large enough."""
        speed = {device: median(self._rows_per_second[device]) for device in set(self._device_ids)}
        shares_of = dict.fromkeys(speed, 0.0)
        for device, share in zip(self._device_ids, self.shares, strict=True):
            shares_of[device] += share / sum(self.shares)
        seconds_now = max(shares_of[device] / speed[device] for device in speed)
        seconds_best = 1 / sum(speed.values())
        if seconds_now > _WORTHWHILE * seconds_best:
            self.shares = tuple(
                speed[device] / self._device_ids.count(device) for device in self._device_ids
            )


def _checked(shares: Any, count: int) -> tuple[float, ...] | None:
    if shares is None:
        return None
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise TypeError(
            f'shares must be "auto" or a list with one number per replica, got {shares!r}'
        )
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"shares must be numbers, got {share!r} in {list(shares)!r}")
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(
                f"shares must be positive and finite, got {share!r} in {list(shares)!r}; "
                f"to leave a device out, leave it out of device_ids"
            )
    if len(shares) != count:
        raise ValueError(
            f"shares has {len(shares)} numbers for {count} replicas; pass one number for each "
            f"entry of device_ids"
        )
    return tuple(shares)
