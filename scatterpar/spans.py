"""Parts of a batch, and spans of rows: in proportion, or as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

Part = Sequence[int]  # of a batch: the numbers of its rows


def divide(rows: int, parts: Sequence[Fraction]) -> tuple[tuple[int, int], ...]:
    """Spans in proportion to ``parts``: first whole rows, then the largest remainders.

    Every part gets at least one row; with fewer rows than parts, the first get one
    each. The parts add up to 1.

    >>> divide(9, [Fraction(3, 4), Fraction(1, 4)])
    ((0, 7), (7, 9))
    """
    # With fewer rows than parts the last ones get none.
    used = parts[:rows]
    sizes = [max(1, int(rows * part)) for part in used]
    missing = [rows * part - size for part, size in zip(used, sizes, strict=True)]
    while sum(sizes) < rows:
        behind = missing.index(max(missing))
        sizes[behind] += 1
        missing[behind] -= 1
    # Too many, if small shares were rounded up to one row.
    while sum(sizes) > rows:
        can_give = [i for i, size in enumerate(sizes) if size > 1]
        ahead = min(can_give, key=missing.__getitem__)
        sizes[ahead] -= 1
        missing[ahead] += 1
    return tuple(pairwise(accumulate(sizes, initial=0)))


def cut_span(start: int, stop: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """Cut ``start:stop`` into at most ``pieces`` spans, the longer ones first.

    >>> cut_span(0, 5, 2)
    ((0, 3), (3, 5))
    """
    pieces = min(pieces, stop - start)
    size, longer = divmod(stop - start, pieces)
    # The first ``longer`` spans have one row more.
    ends = [start + i * size + min(i, longer) for i in range(pieces + 1)]
    return tuple(pairwise(ends))
