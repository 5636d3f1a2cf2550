"""Rows in parts: their order, their sizes, and what a loss may count in them."""

from __future__ import annotations

import pytest
import torch

from scatterpar.causes.counts import NamedTensor, counts_of, named_tensors
from scatterpar.splitting.parts import cut, hidden_counts, order_rows

LABELS = torch.tensor([[1, -100, -100], [1, 2, 3], [-100, 4, -100]])
WEIGHTS = torch.tensor([0.5, 0.0, 0.9])


def ordered(tensor, *groups):
    """The order of rows, and the counts that it hides."""
    tensors = [NamedTensor("batch", tensor)]
    counts = counts_of(tensors, len(tensor))
    rows = order_rows(tensors, counts, groups)
    return rows, [count.words for count in hidden_counts(counts, rows, groups)]


def test_rows_with_most_labels_come_first():
    """Row 1 has three labels. Rows 0 and 2 have one each, and 2 the larger ones."""
    assert ordered(LABELS, [3])[0] == [1, 2, 0]
    assert ordered(WEIGHTS, [3])[0] == [2, 0, 1]


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize("groups", [[[2] * 4], [[4] * 4, [8, 8]], [[5, 3, 2]]])
def test_masks_differ_between_parts_and_ranks(kind, groups):
    """Rows with two and with six entries alternate, in any order of their ids."""
    num_rows = sum(groups[0])
    lengths = torch.where(torch.arange(num_rows) % 2 == 0, 2, 6)
    mask = (torch.arange(6) < lengths[:, None]).to(kind)
    ids = torch.arange(num_rows)[:, None].expand(num_rows, 6)
    batch = {"ids": ids, "mask": mask}
    tensors = named_tensors(batch)
    counts = counts_of(tensors, num_rows)
    rows = order_rows(tensors, counts, groups)
    for sizes in groups:
        terms = mask[rows].double().sum(1).split(sizes)
        assert len({float(part.mean()) for part in terms}) > 1
        assert len({float(part.sum()) for part in terms}) > 1
    assert not hidden_counts(counts, rows, groups)


def test_count_without_first_entry_differs_too():
    """The first entry makes up for the others, so that whole rows count alike."""
    mask = torch.zeros(8, 5, dtype=torch.long)
    mask[::2, 0] = 1
    mask[::2, 1:3] = 1
    mask[1::2, 1:4] = 1
    rows, hidden = ordered(mask, [2] * 4)
    later = mask[rows, 1:].sum(1).split(2)
    assert len({int(part.sum()) for part in later}) > 1
    assert "entries that are not 0" in hidden  # three in each row
    assert "entries that are not 0, without the first of a row" not in hidden


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
