"""Cut the rows of a batch into parts, so that a wrong weight of a part shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import compress

import torch
from torch import Tensor

from scatterpar.causes.counts import IGNORED, Count, NamedTensor, rank_of_labels
from scatterpar.spans import Part, divide

Split = list[list[Part]]  # the parts of each rank
Groups = Sequence[int]  # the numbers of rows of successive parts, or ranks

_LEAST_SPREAD = 0.02  # of a count: an error of 2 % is far above the limit in float64
_NUM_ORDERS = 1024  # a few milliseconds
_ROUNDING_OF_COUNTS = 1e-9  # of sums of counts in float64


def orders_of_rows(
    tensors: Sequence[NamedTensor], counts: Sequence[Count], groups: Sequence[Groups]
) -> tuple[list[Part], list[Count]]:
    """The numbers of all rows, ordered so that every count differs between groups.

    Rows with the most labels come first, then the largest. So the first of several
    parts has the most labels per row, and other classes than the last one. If this
    order hides a count, as that of a mask that alternates, random orders are tried. The
    order whose most similar count differs most is taken. Counts of labels and masks
    weigh twice, because more losses divide by them than by weights, lengths, or the
    number of some class.

    A group may then have no terms, as a part without labels::

        labels of the parts    hides                     shows
        8, 4, 0                what becomes of part 3    a mean of nothing
        6, 4, 2                a mean of nothing         what becomes of each part

    So a second order follows, in which more groups have terms, if there is one.

    ``groups`` has the sizes of parts, and those of ranks, if there are several.

    Returns also the counts of labels, masks or weights that no order shows.
    """
    usual = _order_by_labels(tensors, counts)
    candidates = [count for count in counts if _may_hide(count)]
    if not candidates or not groups:
        return [usual], []
    orders = torch.cat([torch.tensor([usual]), _random_orders(len(usual))])
    spreads, are_filled = _spreads(candidates, orders, groups)
    # More than the least spread shows no better.
    visible = spreads.clamp_max(_LEAST_SPREAD)
    # A count that is the same for all rows does not decide: no order shows it.
    visible[:, [count.is_constant for count in candidates]] = _LEAST_SPREAD
    is_selective = torch.tensor([count.is_selective for count in candidates])
    numbers = [_best(visible, is_selective)]
    # Often the same order again.
    with_terms = _best(visible * are_filled, is_selective)
    if are_filled[with_terms].sum() > are_filled[numbers].sum():
        numbers.append(with_terms)
    is_shown = (are_filled & (spreads >= _ROUNDING_OF_COUNTS))[numbers].any(0)
    selected: list[Part] = orders[numbers].tolist()
    return selected, list(compress(candidates, ~is_shown))


def _may_hide(count: Count) -> bool:
    """Whether a loss may count so, and an order of rows hide it.

    An id that happens to be 0 in some row is neither padding nor a weight. Weights that
    are the same for all rows hide nothing.
    """
    is_varied_sum = count.is_sum and not count.is_constant
    return any(count.per_row) and (count.is_selective or is_varied_sum)


def _random_orders(num_rows: int) -> Tensor:
    # The same orders in each run, so that a report can be repeated.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_NUM_ORDERS, num_rows, generator=generator).argsort(1)


def _best(spreads: Tensor, is_selective: Tensor) -> int:
    """The first of equally good orders, which is the usual one if all counts show."""
    smallest = spreads.amin(1)
    if is_selective.any():
        smallest = smallest + spreads[:, is_selective].amin(1)
    return int((smallest >= smallest.max() - _ROUNDING_OF_COUNTS).nonzero()[0])


def _order_by_labels(
    tensors: Sequence[NamedTensor], counts: Sequence[Count]
) -> list[int]:
    """Rows with the most labels first, then those with the largest entries."""
    # No other counts: a part without weights would divide by zero.
    columns = [counts[0].per_row]  # a batch may have no tensor
    columns += [count.per_row for count in counts if count.ignored == IGNORED[0]]
    num_rows = len(columns[0])
    for _, tensor in sorted(tensors, key=rank_of_labels):
        # Means break ties, so that classes and sizes differ between parts, too.
        means = tensor.reshape(num_rows, -1).double().nan_to_num().mean(1)
        columns.append(tuple(means.tolist()))
    keys = list(zip(*columns, strict=True))
    return sorted(range(num_rows), key=keys.__getitem__, reverse=True)


def _spreads(
    counts: Sequence[Count], orders: Tensor, groups: Sequence[Groups]
) -> tuple[Tensor, Tensor]:
    """By order and count, how much the count differs between groups of rows.

    The smallest over parts and ranks, for the terms of a group and for those per row:
    a loop may weigh groups equally, or by rows.

    Returns also whether all groups have terms.
    """
    table = torch.tensor([count.per_row for count in counts], dtype=torch.float64)
    by_order = table[:, orders].transpose(0, 1)
    # Nobody divides by the padding of a mask, of which most parts may have none.
    is_padding = torch.tensor([count.ignored == 1 for count in counts])
    spreads = []
    are_filled = []
    for sizes in groups:
        parts = by_order.split(list(sizes), 2)
        terms = torch.stack([part.sum(2) for part in parts])
        per_row = torch.stack([part.mean(2) for part in parts])
        are_filled.append(terms.all(0) | is_padding)
        # A loop may weigh parts equally, or by rows: neither may hide the count.
        spreads += [_relative_spread(terms), _relative_spread(per_row)]
    return torch.stack(spreads).amin(0), torch.stack(are_filled).all(0)


def _relative_spread(numbers: Tensor) -> Tensor:
    """How far numbers in the first dimension are apart, over their mean."""
    spread = numbers.amax(0) - numbers.amin(0)
    return spread / numbers.abs().mean(0).clamp_min(math.ulp(1.0))


def cut_into_parts(rows: Sequence[int], count: int, *, equal: bool) -> list[Part]:
    """Cut rows into ``count`` parts, none of them empty.

    Unless they are equal, sizes fall from the first to the last:

    >>> [len(part) for part in cut_into_parts(range(16), 4, equal=False)]
    [6, 5, 3, 2]

    Raises ``ValueError`` if equal parts would leave rows over.
    """
    if equal and len(rows) % count:
        raise ValueError(
            f"{len(rows)} rows cannot be cut into {count} equal parts; pass a batch "
            f"with a multiple of {count} rows, or equal=False"
        )
    # 4 : 3 : 2 : 1, so that no two neighbours of a few parts are alike.
    shares = [1] * count if equal else range(count, 0, -1)
    spans = divide(len(rows), [Fraction(share, sum(shares)) for share in shares])
    return [list(rows[start:stop]) for start, stop in spans]
