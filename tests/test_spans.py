"""Rows are divided in proportion, and cut as evenly as possible."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from scatterpar.spans import cut_span, divide

pytestmark = pytest.mark.core


def sizes(spans):
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    return [stop - start for start, stop in spans]


@pytest.mark.parametrize(
    ("rows", "shares", "expected"),
    [
        (16, (4, 3, 2, 1), [6, 5, 3, 2]),  # 6.4, 4.8, 3.2, 1.6
        (9, (1, 1, 1, 1), [3, 2, 2, 2]),
        (7, (3, 1), [5, 2]),  # 5.25, 1.75
        (3, (1, 1, 1, 1), [1, 1, 1]),  # nobody gets none
        (4, (100, 1, 1), [2, 1, 1]),  # small shares are rounded up to a row
    ],
)
def test_rows_divided_in_proportion(rows, shares, expected):
    parts = [Fraction(share, sum(shares)) for share in shares]
    spans = divide(rows, parts)
    assert sizes(spans) == expected
    assert (spans[0][0], spans[-1][1]) == (0, rows)


@pytest.mark.parametrize(
    ("pieces", "expected"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (9, [1] * 5)]
)
def test_longer_spans_come_first(pieces, expected):
    spans = cut_span(2, 7, pieces)
    assert sizes(spans) == expected
    assert (spans[0][0], spans[-1][1]) == (2, 7)
