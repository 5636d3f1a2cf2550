"""Cut the rows of a batch into parts, so that a wrong weight of a part shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from scatterpar.causes.counts import IGNORED, Count, NamedTensor, rank_of_labels

Part = list[int]  # the numbers of its rows
Split = list[list[Part]]  # the parts of each rank
Groups = Sequence[int]  # the numbers of rows of successive parts, or ranks

_LEAST_SPREAD = 0.02  # of a count, between the parts, for it to show
_NUM_ORDERS = 256  # that are tried if some count does not show
_ROUNDING = 1e-9


def order_rows(
    tensors: Sequence[NamedTensor], counts: Sequence[Count], groups: Sequence[Groups]
) -> list[int]:
    """The numbers of all rows, ordered so that every count differs between groups.

    Rows with the most labels come first, then the largest. So the first of several
    parts has the most labels per row, and other classes than the last one. If this
    order hides a count, as that of a mask that alternates, other orders are tried:
    those by each count, and by sums of counts. The order whose most similar count
    differs most is taken. Counts of labels and masks weigh twice, because more losses
    divide by them than by weights, lengths, or the number of some class.

    ``groups`` has the sizes of parts, and those of ranks.
    """
    usual = _order_by_labels(tensors, sum(groups[0]))
    is_selective: dict[tuple[float, ...], bool] = {}  # by the terms of each row
    for count in counts:
        # An id that happens to be 0 in some row is neither padding nor a weight.
        may_count = count.is_selective or count.is_sum
        if may_count and not count.is_constant:
            is_selective[count.per_row] = (
                is_selective.get(count.per_row, False) or count.is_selective
            )
    if not is_selective or all(len(sizes) == 1 for sizes in groups):
        return usual
    table = torch.tensor(list(is_selective), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    scaled = (table - table.mean(1, keepdim=True)) / table.std(1, keepdim=True)
    # Sums of counts in random proportions separate rows that single counts do not.
    factors = torch.randn(
        _NUM_ORDERS, len(table), generator=generator, dtype=torch.float64
    )
    keys = torch.cat([scaled, factors @ scaled])
    orders = torch.cat([torch.tensor([usual]), keys.argsort(1, descending=True)])
    # More than the least spread shows no better.
    spreads = _spreads(table, orders, groups).clamp_max(_LEAST_SPREAD)
    smallest = spreads.amin(1)
    if any(is_selective.values()):
        smallest += spreads[:, list(is_selective.values())].amin(1)
    # The first of equally good orders, which is the usual one if all counts show.
    best = int((smallest >= smallest.max() - _ROUNDING).nonzero()[0])
    order: list[int] = orders[best].tolist()
    return order


def _order_by_labels(tensors: Sequence[NamedTensor], num_rows: int) -> list[int]:
    features = []
    in_order = sorted(tensors, key=rank_of_labels)
    for _, tensor in in_order:
        if not tensor.is_floating_point():
            is_label = tensor != IGNORED[0]
            features.append(is_label.reshape(num_rows, -1).sum(1))
    # Means break ties, so that classes and sizes differ between parts, too.
    for _, tensor in in_order:
        flat = tensor.reshape(num_rows, -1)
        features.append(flat.double().nan_to_num().mean(1))
    columns = [feature.tolist() for feature in features]
    return sorted(
        range(num_rows),
        key=lambda row: [column[row] for column in columns],
        reverse=True,
    )


def _spreads(table: Tensor, orders: Tensor, groups: Sequence[Groups]) -> Tensor:
    """By order and count, how much the count differs between groups of rows.

    The smallest over parts and ranks, for the terms of a group and for those per row:
    a loop may weigh groups equally, or by rows.
    """
    sums = table[:, orders].transpose(0, 1).cumsum(2)
    sums = torch.nn.functional.pad(sums, (1, 0))
    spreads = []
    for sizes in groups:
        if len(sizes) == 1:
            continue
        stops = torch.tensor([0, *accumulate(sizes)])
        terms = sums[:, :, stops].diff(dim=2)
        # A loop may weigh parts equally, or by rows: neither may hide the count.
        for numbers in (terms, terms / torch.tensor(sizes)):
            spread = numbers.amax(2) - numbers.amin(2)
            spreads.append(spread / numbers.abs().mean(2).clamp_min(math.ulp(1.0)))
    return torch.stack(spreads).amin(0)


def hidden_counts(
    counts: Sequence[Count], rows: Sequence[int], groups: Sequence[Groups]
) -> list[Count]:
    """The counts of labels, masks or weights that are the same in all groups, per row.

    Weights that are the same for all rows hide nothing.
    """
    if all(len(sizes) == 1 for sizes in groups):
        return []
    hidden = []
    for count in counts:
        may_differ = count.is_selective or (count.is_sum and not count.is_constant)
        if not may_differ or not any(count.per_row):
            continue
        table = torch.tensor([count.per_row], dtype=torch.float64)
        spread = _spreads(table, torch.tensor([list(rows)]), groups)
        if float(spread) < _ROUNDING:
            hidden.append(count)
    return hidden


def cut(rows: Sequence[int], count: int, *, equal: bool) -> list[Part]:
    """Cut rows into ``count`` parts, none of them empty.

    Unless they are equal, sizes fall from the first to the last:

    >>> [len(part) for part in cut(range(16), 4, equal=False)]
    [6, 4, 4, 2]

    Raises ``ValueError`` if equal parts would leave rows over.
    """
    if equal and len(rows) % count:
        raise ValueError(
            f"{len(rows)} rows cannot be cut into {count} equal parts; pass a batch "
            f"with a multiple of {count} rows, or equal=False"
        )
    # 4 : 3 : 2 : 1, so that no two neighbours of a few parts are alike.
    shares = [1] * count if equal else list(range(count, 0, -1))
    spare = len(rows) - count  # after each part has one row
    stops = [0]
    for number in range(1, count + 1):
        stops.append(number + round(spare * sum(shares[:number]) / sum(shares)))
    sizes = [stop - start for start, stop in pairwise(stops)]
    parts = []
    start = 0
    for size in sorted(sizes, reverse=True):
        parts.append(list(rows[start : start + size]))
        start += size
    return parts
