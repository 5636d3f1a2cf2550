"""One output, cut by parts, beside the outputs of the parts."""

from __future__ import annotations

import math

import pytest
import torch

from scatterpar.verify.output_differences import (
    cut_by_parts,
    cut_rows,
    difference_by_rows,
)

PARTS = [[0, 1], [2]]
ROWS = torch.tensor([[1.0], [2.0], [4.0]])


def test_output_cut_by_sizes_of_parts():
    output = {"rows": ROWS, "pairs": torch.arange(6), "scale": torch.ones(())}
    first, second = cut_by_parts(output, PARTS, 0)
    assert first["rows"].tolist() == [[1], [2]]
    assert first["pairs"].tolist() == [0, 1, 2, 3]
    assert second["pairs"].tolist() == [4, 5]
    assert first["scale"] is second["scale"] is output["scale"]


def test_cut_has_its_own_memory():
    cut = cut_rows(ROWS, 1, 2, 3, 0)
    assert cut.tolist() == [[2], [4]]
    assert cut.data_ptr() != ROWS[1:].data_ptr()


def pieces(*rows):
    return [torch.tensor(values) for values in rows]


def difference_of(function):
    """That of the outputs that ``function`` computes for all rows and for parts."""
    parts = [function(ROWS[:2]), function(ROWS[2:])]
    return difference_by_rows(function(ROWS), parts, PARTS, 0)


def test_outputs_equal_to_parts_agree():
    assert difference_of(lambda rows: rows) == 0


def test_dependent_row_is_measured():
    """Of the second part: 3 in the place of 4."""
    computed = pieces([[1.0], [2.0]], [[3.0]])
    assert difference_by_rows(ROWS, computed, PARTS, 0) == 0.25


def test_equal_value_for_all_has_no_rows():
    codebook = torch.tensor([5.0, 6.0, 7.0])
    assert difference_of(lambda _: codebook) == 0


def row_by_row(*views):
    return torch.stack(views, 1).flatten(0, 1)


def test_entries_row_by_row_in_order():
    assert difference_of(lambda rows: row_by_row(rows, -rows)) == 0


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("computed", "whole", "difference"),
    [
        ([1.0, 1.0], [1.0, 2.0], 0.5),
        ([NAN, 1.0], [NAN, 2.0], 0.5),  # of a row without a term, in both
        ([INF, 1.0], [INF, 2.0], 0.5),
        ([NAN, 2.0], [0.0, 2.0], INF),  # NaN is no zero
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([INF, 2.0], [-INF, 2.0], INF),
        ([1.0, 2.0], [INF, 2.0], INF),
    ],
)
def test_outputs_relative_to_largest_entry(computed, whole, difference):
    pieces = [torch.tensor([row]) for row in computed]
    found = difference_by_rows(torch.tensor(whole), pieces, [[0], [1]], 0)
    assert found == difference


def test_integers_equal_or_infinitely_off():
    pieces = [torch.tensor([1]), torch.tensor([2])]
    assert difference_by_rows(torch.tensor([1, 2]), pieces, [[0], [1]], 0) == 0
    assert difference_by_rows(torch.tensor([1, 3]), pieces, [[0], [1]], 0) == INF
