"""Rows in parts: their order, their sizes, and what a loss may count in them."""

from __future__ import annotations

import pytest
import torch

from scatterpar import Rows
from scatterpar.splitting import parts
from scatterpar.splitting.parts import (
    counts_of_rows,
    cut,
    order_rows,
    tensors_with_rows,
)

LABELS = torch.tensor([[1, -100, -100], [1, 2, 3], [-100, 4, -100]])
WEIGHTS = torch.tensor([0.5, 0.0, 0.9])


def test_labels_before_integers_before_floats():
    ids = torch.zeros(3, 2, dtype=torch.long)
    found = tensors_with_rows({"weights": WEIGHTS, "ids": ids, "labels": LABELS})
    assert [tensor.dtype for tensor in found] == [torch.long, torch.long, torch.float]
    assert torch.equal(found[0], LABELS)


def test_rows_count_elements_of_entries():
    (sizes,) = tensors_with_rows(Rows([torch.ones(3), torch.ones(2, 2)], list))
    assert sizes.tolist() == [3, 4]


def test_rows_with_most_labels_come_first():
    """Row 1 has three labels. Rows 0 and 2 have one each, and 2 the larger ones."""
    assert order_rows([LABELS], 3) == [1, 2, 0]
    assert order_rows([WEIGHTS], 3) == [2, 0, 1]


@pytest.mark.parametrize(
    ("rows", "count", "equal", "sizes"),
    [
        (16, 4, False, [6, 4, 4, 2]),
        (16, 4, True, [4, 4, 4, 4]),
        (7, 2, False, [4, 3]),
        (5, 5, False, [1] * 5),
        (6, 1, False, [6]),
    ],
)
def test_sizes_fall_unless_equal(rows, count, equal, sizes):
    found = cut(range(rows), count, equal=equal)
    assert [len(part) for part in found] == sizes
    assert [row for part in found for row in part] == list(range(rows))


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("equal", [True, False])
def test_parts_cut_in_order_none_empty(parts, equal):
    rows = list(range(parts * 3))
    cuts = cut(rows, parts, equal=equal)
    assert [row for part in cuts for row in part] == rows
    sizes = [len(part) for part in cuts]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) > 0
    assert (len(set(sizes)) == 1) == (equal or parts == 1)


def test_equal_parts_with_rest_refused():
    with pytest.raises(ValueError, match="7 rows cannot be cut into 2 equal parts"):
        cut(range(7), 2, equal=True)


def test_terms_are_counted_by_row():
    counts = dict(counts_of_rows([LABELS], 3))
    assert counts["rows"] == [1, 1, 1]
    assert counts["labels that are not -100"] == [1, 3, 1]
    assert counts["labels that are not -100, without the first of a row"] == [0, 2, 1]
    assert counts["labels that are not 255"] == [3, 3, 3]


def test_nonzero_entries_are_counted():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert dict(counts_of_rows([mask], 3))["entries that are not 0"] == [2, 1, 0]


def test_equal_label_counts_hide_terms():
    assert parts.hides_counts([torch.tensor([[1, 2], [3, 4]])], 2)
    assert not parts.hides_counts([LABELS], 3)
    assert not parts.hides_counts([torch.tensor([1, 2])], 2)  # one label per row
