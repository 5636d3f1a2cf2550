"""One output, cut by parts, beside the outputs of the parts."""

from __future__ import annotations

import pytest
import torch

from scatterpar.verify.output_differences import (
    compare_outputs,
    cut_by_parts,
    cut_rows,
    entries_per_row,
)

PARTS = [[0, 1], [2]]
ROWS = torch.tensor([[1.0], [2.0], [4.0]])


@pytest.mark.parametrize(
    ("shape", "dim", "entries"),
    [
        ((6, 2), 0, 2),
        ((3,), 0, 1),
        ((4, 3), 1, 1),
        ((4,), 0, 0),
        ((), 0, 0),
        ((3,), 1, 0),
    ],
)
def test_entries_per_row_of_three_rows(shape, dim, entries):
    assert entries_per_row(torch.zeros(shape), 3, dim) == entries


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


def differences_of(function):
    """Those of the outputs that ``function`` computes for all rows and for parts."""
    parts = [function(ROWS[:2]), function(ROWS[2:])]
    return compare_outputs(function(ROWS), parts, PARTS, 0)


def test_outputs_equal_to_parts_agree():
    assert differences_of(lambda rows: rows) == (0, 0)


def test_dependent_row_is_measured():
    """Of the second part: 3 in the place of 4."""
    computed = pieces([[1.0], [2.0]], [[3.0]])
    assert compare_outputs(ROWS, computed, PARTS, 0) == (0.25, 0)


def test_equal_value_for_all_has_no_rows():
    codebook = torch.tensor([5.0, 6.0, 7.0])
    assert differences_of(lambda _: codebook) == (0, 0)


def centred(rows):
    return rows - rows.mean()


def view_by_view(*views):
    return torch.cat(views)


def row_by_row(*views):
    return torch.stack(views, 1).flatten(0, 1)


@pytest.mark.parametrize("normed", [torch.clone, centred])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_views_out_of_order(normed, dtype):
    """``torch.cat([rows, -rows])`` has all rows before their negatives."""

    def two_views(rows):
        return view_by_view(normed(rows), -normed(rows)).to(dtype)

    assert differences_of(two_views)[1] == 6


def test_entries_row_by_row_in_order():
    assert differences_of(lambda rows: row_by_row(rows, -rows)) == (0, 0)


def test_histograms_cannot_be_joined():
    """As many entries for fewer rows, such as histograms, have no rows to join."""
    histograms = pieces([1.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    whole = torch.tensor([1.0, 1.0, 1.0])
    assert compare_outputs(whole, histograms, PARTS, 0) == (0, 3)
