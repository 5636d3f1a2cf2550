"""Micro-batches by cost: rows of similar cost share a micro-batch, whose cost is
limited.

A micro-batch costs its number of rows times their largest cost, since rows are padded
to the longest one. A row that costs more than the limit is a micro-batch of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import nn

from scatterpar.option_checks import check_number
from scatterpar.options.call_arguments import parameters_of
from scatterpar.plan import Plan, Share, dealt, make_plan
from scatterpar.tables import shown


class Array(Protocol):
    """A tensor, or an array of NumPy or another library."""

    def tolist(self) -> Any:
        """The numbers, as lists."""


Costs = Sequence[float] | Array

_LIMITS = 2**20  # that are tried for the largest cost of a micro-batch, by bisection


@dataclass(frozen=True)
class CostPlan(Plan):
    """A plan by cost; ``costs`` has one number per row."""

    costs: tuple[float, ...] = ()

    def load_of(self, share: Share) -> float:
        """The padded cost of a share.

        That is for each micro-batch its number of rows times their largest cost.
        """
        loads: list[float] = []
        for rows in share.row_numbers:
            largest = max(self.costs[row] for row in rows)
            loads.append(len(rows) * largest)
        return sum(loads)

    def cost_of(self, share: Share) -> float:
        """The cost of a share without padding."""
        return sum(self.costs[row] for rows in share.row_numbers for row in rows)

    def __str__(self) -> str:
        """A table with one line per share, with the rows of each sub-step."""
        padded = sum(map(self.load_of, self.shares))
        cost = sum(self.costs)
        table = [_HEADS]
        for share in self.shares:
            load = self.load_of(share)
            rows_by_substep = [str(list(rows)) for rows in share.row_numbers]
            line = (
                str(share.replica),
                str(share.device),
                str(share.rows),
                f"{self.cost_of(share):,.6g}",
                f"{load:,.6g}",
                f"{load / padded:.1%}" if padded else "-",
                str(len(rows_by_substep)),
                shown(" + ".join(rows_by_substep)),
            )
            table.append(line)
        padding = f" ({padded / cost - 1:.1%} more)" if cost else ""
        title = f", by cost: {cost:,.6g}, with padding {padded:,.6g}{padding}"
        return self.printed(table, title)


_HEADS = (
    "replica",
    "device",
    "rows",
    "cost",
    "padded",
    "load",
    "sub-steps",
    "rows of each",
)


def has_costs_argument(module: nn.Module) -> bool:
    """Whether the module's ``forward`` takes ``costs``, or any keyword argument."""
    return any(
        parameter.name == "costs" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters_of(module)
    )


def plan_by_cost(
    rows: int | Sequence[int],
    costs: Costs | None,
    devices: Sequence[torch.device],
    budget: float | None,
    shares: Sequence[float],
    threads: Sequence[int] = (),
) -> CostPlan:
    """Cut rows, sorted by cost, into micro-batches within ``budget``.

    The micro-batches are dealt to ``devices``, one replica per entry. Their number is a
    multiple of the number of replicas, if there are enough rows. The cuts minimise the
    largest cost of a micro-batch. Loads are in proportion to ``shares``, up to whole
    micro-batches. With ``threads`` the plan is ``dealt``.

    Raises ``ValueError`` without costs or budget, for costs that do not fit the rows,
    and for several batches; ``TypeError`` for costs that are no numbers.

    >>> plan = plan_by_cost(6, [1, 4, 1, 4, 1, 1], [torch.device("cpu")] * 2, 4, [1, 1])
    >>> [share.row_numbers for share in plan.shares]
    [((1,), (0, 2)), ((3,), (4, 5))]
    """
    # The plain plan refuses what is no number of rows.
    num_rows = make_plan(rows, devices).rows
    if budget is None:
        raise ValueError(
            "costs= without a limit: this engine cuts by the number of rows; make it "
            "with micro_batch_cost=, the most that a micro-batch may cost"
        )
    if not isinstance(rows, int) and len(rows) > 1:
        raise ValueError(
            f"micro_batch_cost mixes rows, and Rows.from_batches keeps {len(rows)} "
            f"batches apart; pass all rows as one batch, such as Rows(entries, collate)"
        )
    numbers = _checked(costs, num_rows, budget)
    num_replicas = min(len(devices), num_rows)
    micro_batches = _cut(numbers, budget, num_replicas)
    # The first row of each is the most expensive: all are padded to its length.
    loads = [len(rows) * numbers[rows[0]] for rows in micro_batches]
    planned: list[Share] = []
    start = 0
    for replica, numbers_of_replica in enumerate(_deal(loads, shares[:num_replicas])):
        # Sorted: within a micro-batch rows keep the order of the batch.
        row_numbers = tuple(
            tuple(sorted(micro_batches[number])) for number in numbers_of_replica
        )
        ends = list(accumulate(map(len, row_numbers), initial=start))
        spans = tuple(pairwise(ends))
        planned.append(Share(replica, devices[replica], spans, row_numbers))
        start = ends[-1]
    plan = CostPlan(num_rows, tuple(planned), costs=numbers)
    return dealt(plan, [num_rows], threads) if threads else plan


def _deal(loads: Sequence[float], shares: Sequence[float]) -> list[list[int]]:
    """The numbers of the micro-batches of each replica, the largest load first.

    Each goes to the replica that would finish first (longest processing time first,
    Graham 1969). Every replica gets at least one.
    """
    num_replicas = len(shares)
    dealt: list[list[int]] = [[] for _ in range(num_replicas)]
    loads_of_replicas = [0.0] * num_replicas
    descending = sorted(range(len(loads)), key=lambda number: -loads[number])
    for count, number in enumerate(descending):
        candidates = list(range(num_replicas))
        idle = [replica for replica in candidates if not dealt[replica]]
        # The last micro-batches go to replicas without one, however fast the others
        # are.
        remaining = len(loads) - count
        if remaining <= len(idle):
            candidates = idle

        def finished(replica: int, load: float = loads[number]) -> tuple[float, int]:
            end = (loads_of_replicas[replica] + load) / shares[replica]
            return end, len(dealt[replica])

        first = min(candidates, key=finished)  # of equal ones the lowest
        dealt[first].append(number)
        loads_of_replicas[first] += loads[number]
    return dealt


def _checked(costs: Costs | None, rows: int, budget: float) -> tuple[float, ...]:
    if costs is None:
        raise ValueError(
            f"micro_batch_cost={budget} without costs; pass costs=, one number per "
            "row, such as the lengths of sequences"
        )
    values = costs
    if hasattr(costs, "tolist"):  # tensors and arrays
        values = costs.tolist()
    # A generator would be empty in the second try of a step.
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(
            "costs must be one number per row, as a list or a 1-D tensor, got "
            f"{costs!r}"
        )
    if len(values) != rows:
        raise ValueError(
            f"costs has {len(values)} numbers for {rows} rows; pass one per row"
        )
    numbers = [value.item() if hasattr(value, "item") else value for value in values]
    for row, cost in enumerate(numbers):
        check_number("each of costs", cost, f" for row {row}", zero=True)
    return tuple(numbers)


def _cut(costs: Sequence[float], budget: float, replicas: int) -> list[list[int]]:
    """The rows of each micro-batch, the most expensive rows first.

    There are as few micro-batches as the budget allows, rounded up to a multiple of
    ``replicas``.
    """
    # Rows of like cost beside each other are padded least.
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])  # stable
    falling = [costs[row] for row in rows]
    # A multiple of the replicas, so that none computes while all others wait.
    fewest = len(_ends(falling, budget, len(rows)))
    rounded_up = -(-fewest // replicas) * replicas
    number = min(len(rows), rounded_up)

    def last_end(part: int) -> int:
        return _ends(falling, budget * part / _LIMITS, number)[-1]

    # The smallest limit within which so many micro-batches have all rows.
    limit = bisect_left(range(_LIMITS), len(rows), key=last_end)
    ends = _ends(falling, budget * limit / _LIMITS, number)
    pieces = [rows[start:stop] for start, stop in pairwise([0, *ends])]
    # Rows of equal cost may leave fewer pieces: halves cost no more.
    while len(pieces) < number:
        position = _most_expensive(pieces, costs)
        piece = pieces[position]
        # Half of the rows at the same largest cost: the limit still holds.
        half = len(piece) // 2
        pieces[position : position + 1] = [piece[:half], piece[half:]]
    return pieces


def _most_expensive(pieces: Sequence[Sequence[int]], costs: Sequence[float]) -> int:
    """The number of the piece with the largest padded cost that can be halved."""
    keys = [
        (len(piece) > 1, len(piece) * costs[piece[0]], len(piece)) for piece in pieces
    ]
    return keys.index(max(keys))


def _ends(falling: Sequence[float], limit: float, max_pieces: int) -> list[int]:
    """The ends of at most ``max_pieces`` micro-batches, each as large as it may be."""
    ends: list[int] = []
    start = 0
    while start < len(falling) and len(ends) < max_pieces:
        cost = falling[start]
        # Rows that cost nothing, at the end, are one piece.
        size = len(falling) - start
        if cost:
            # Falling costs: the first row is the largest, and all others are padded to
            # it.
            size = max(1, int(min(size, limit / cost)))
            if size > 1 and size * cost > limit:  # the quotient was rounded up
                size -= 1
        start += size
        ends.append(start)
    return ends
