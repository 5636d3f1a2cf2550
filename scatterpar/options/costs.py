"""Micro-batches by cost: rows of similar cost share a micro-batch, whose cost is
limited.

A micro-batch costs its number of rows times their largest cost, since rows are padded
to the longest one. A row that costs more than the limit is a micro-batch of its own.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from scatterpar.option_checks import check_number
from scatterpar.plan import Plan, Share, make_plan
from scatterpar.tables import shown

_LIMITS = 2**20  # that are tried for the largest cost of a micro-batch, by bisection


@dataclass(frozen=True)
class CostPlan(Plan):
    """A plan by cost; ``costs`` has one number per row."""

    costs: tuple[float, ...] = ()

    def load_of(self, share: Share) -> float:
        """The padded cost of a share: for each micro-batch its rows times their largest
        cost.
        """
        return sum(
            len(rows) * max(self.costs[row] for row in rows)
            for rows in share.row_numbers
        )

    def __str__(self) -> str:
        """A table with one line per share: cost without and with padding, rows per
        sub-step.
        """
        padded, cost = sum(map(self.load_of, self.shares)), sum(self.costs)
        heads = (
            "replica",
            "device",
            "rows",
            "cost",
            "padded",
            "load",
            "sub-steps",
            "rows of each",
        )
        table = [heads]
        for share in self.shares:
            load, row_numbers = self.load_of(share), share.row_numbers
            cost_of_rows = sum(self.costs[row] for rows in row_numbers for row in rows)
            part = f"{load / padded:.1%}" if padded else "-"
            numbers = f"{share.rows}", f"{cost_of_rows:,.6g}", f"{load:,.6g}", part
            each = (
                str(len(row_numbers)),
                shown(" + ".join(str([*rows]) for rows in row_numbers)),
            )
            table.append((str(share.replica), str(share.device), *numbers, *each))
        more = f" ({padded / cost - 1:.1%} more)" if cost else ""
        return self.printed(
            table, f", by cost: {cost:,.6g}, with padding {padded:,.6g}{more}"
        )


def has_costs_argument(module: nn.Module) -> bool:
    """Whether the module's ``forward`` takes an argument ``costs`` or any keyword
    argument.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == "costs" or p.kind is p.VAR_KEYWORD for p in parameters)


def plan_by_cost(
    rows: int | Sequence[int],
    costs: Any,
    devices: Sequence[torch.device],
    budget: float | None,
    shares: Sequence[float],
) -> CostPlan:
    """Cut rows, sorted by cost, into micro-batches within ``budget``; assign them to
    ``devices``.

    The number of micro-batches is a multiple of the number of replicas, if there are
    enough rows. The cuts minimise the largest cost of a micro-batch. Loads are in
    proportion to ``shares``, up to whole micro-batches. Raises ``ValueError`` without
    costs or budget, for costs that do not fit the rows, and for several batches;
    ``TypeError`` for costs that are no numbers.

    >>> plan = plan_by_cost(6, [1, 4, 1, 4, 1, 1], [torch.device("cpu")] * 2, 4, [1, 1])
    >>> [share.row_numbers for share in plan.shares]
    [((1,), (0, 2)), ((3,), (4, 5))]
    """
    number = make_plan(rows, devices).rows
    if budget is None:
        raise ValueError(
            "costs= without a limit: this engine cuts by the number of rows; make it "
            "with "
            "micro_batch_cost=, the most that a micro-batch may cost"
        )
    if not isinstance(rows, int) and len(rows) > 1:
        raise ValueError(
            f"micro_batch_cost mixes rows, and Rows.from_batches keeps {len(rows)} "
            "batches apart; "
            f"pass all rows as one batch, such as Rows(entries, collate)"
        )
    numbers = _checked(costs, number, budget)
    used = min(len(devices), number)
    pieces = [
        (len(piece) * numbers[piece[0]], piece) for piece in _cut(numbers, budget, used)
    ]
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(used)]
    loads = [0.0] * used
    for dealt_out, (load, piece) in enumerate(
        sorted(pieces, key=itemgetter(0), reverse=True)
    ):
        # The replica that would finish first (longest processing time first, Graham
        # 1969). At the end, replicas without a micro-batch come first: each gets at
        # least one.
        idle = [replica for replica in range(used) if not dealt[replica]]
        among = idle if len(pieces) - dealt_out <= len(idle) else range(used)
        best = min(
            among, key=lambda r: ((loads[r] + load) / shares[r], len(dealt[r]), r)
        )
        dealt[best].append(tuple(sorted(piece)))
        loads[best] += load
    planned: list[Share] = []
    for replica, row_numbers in enumerate(dealt):
        ends = [
            *accumulate(
                map(len, row_numbers), initial=planned[-1].stop if planned else 0
            )
        ]
        spans, device = tuple(pairwise(ends)), devices[replica]
        planned.append(
            Share(replica, device, ends[0], ends[-1], spans, tuple(row_numbers))
        )
    return CostPlan(number, tuple(planned), numbers)


def _checked(costs: Any, rows: int, budget: float) -> tuple[float, ...]:
    if costs is None:
        raise ValueError(
            f"micro_batch_cost={budget} without costs; pass costs=, one number per "
            "row, such as "
            f"the lengths of sequences"
        )
    # of tensors and arrays
    values = costs.tolist() if hasattr(costs, "tolist") else costs
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
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])  # stable
    falling = [costs[row] for row in rows]
    number = len(_ends(falling, budget, len(rows)))
    number = min(len(rows), -(-number // replicas) * replicas)

    def cut_within(part: int) -> list[int]:
        return _ends(falling, budget * part / _LIMITS, number)

    first = bisect_left(
        range(_LIMITS), len(rows), key=lambda part: cut_within(part)[-1]
    )
    pieces = [rows[start:stop] for start, stop in pairwise([0, *cut_within(first)])]
    while len(pieces) < number:
        sizes = [
            (len(piece) > 1, len(piece) * costs[piece[0]], len(piece))
            for piece in pieces
        ]
        i = sizes.index(max(sizes))
        half = len(pieces[i]) // 2
        pieces[i : i + 1] = pieces[i][:half], pieces[i][half:]
    return pieces


def _ends(falling: Sequence[float], limit: float, max_pieces: int) -> list[int]:
    """The ends of at most ``max_pieces`` micro-batches, each as large as the limit
    allows.
    """
    ends: list[int] = []
    start = 0
    while start < len(falling) and len(ends) < max_pieces:
        cost, size = falling[start], len(falling) - start
        if cost:
            size = max(1, int(min(size, limit / cost)))
            size -= size > 1 and size * cost > limit  # the quotient was rounded up
        start += size
        ends.append(start)
    return ends
