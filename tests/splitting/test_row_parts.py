"""Rows in parts: their order, their sizes, and what a loss may count in them."""

from __future__ import annotations

import pytest
import torch

from scatterpar.causes.counts import NamedTensor, counts_of, named_tensors
from scatterpar.splitting.row_parts import cut_into_parts, orders_of_rows

LABELS = torch.tensor([[1, -100, -100], [1, 2, 3], [-100, 4, -100]])
WEIGHTS = torch.tensor([0.5, 0.0, 0.9])


def ordered(tensor, *groups):
    """The order of rows, and the counts that it hides."""
    tensors = [NamedTensor("batch", tensor)]
    counts = counts_of(tensors, len(tensor))
    orders, hidden = orders_of_rows(tensors, counts, groups)
    return orders[0], [count.words for count in hidden]


def test_rows_with_most_labels_come_first():
    """Row 1 has three labels. Rows 0 and 2 have one each, and 2 the larger ones."""
    assert ordered(LABELS)[0] == [1, 2, 0]
    assert ordered(WEIGHTS)[0] == [2, 0, 1]


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
    (rows,), hidden = orders_of_rows(tensors, counts, groups)
    assert not hidden
    for sizes in groups:
        terms = mask[rows].double().sum(1).split(sizes)
        assert len({float(part.mean()) for part in terms}) > 1
        assert len({float(part.sum()) for part in terms}) > 1


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


@pytest.mark.parametrize("groups", [[[4] * 4], [[8, 8]], [[4] * 4, [8, 8]]])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_second_order_gives_each_part_terms(groups, ignored):
    """Half of the rows count, and come first in the first order."""
    labels = torch.arange(1, 17).masked_fill(torch.arange(16) % 2 == 0, ignored)
    labels = labels if ignored else labels.bool()
    tensors = [NamedTensor("batch", labels)]
    counts = counts_of(tensors, 16)
    (first, second), hidden = orders_of_rows(tensors, counts, groups)
    assert not hidden
    is_counted = labels != ignored
    for sizes in groups:
        assert not is_counted[first].split(sizes)[-1].any()
        terms = [int(part.sum()) for part in is_counted[second].split(sizes)]
        assert min(terms) > 0
        assert len(set(terms)) > 1


def test_complement_of_a_mask_hides_no_terms():
    """Entries that are 0 in one mask are as many as those that are 1 in the other one.

    Nobody divides by padding, but somebody may by the terms with the same numbers.
    """
    mask = (torch.arange(16) % 2 == 0)[:, None].expand(16, 3)
    tensors = named_tensors({"mask": mask, "padding": ~mask})
    orders, hidden = orders_of_rows(tensors, counts_of(tensors, 16), [[4] * 4])
    terms = [part.sum() for part in mask[orders[-1]].split(4)]
    assert min(terms) > 0
    assert not hidden


def test_terms_in_too_few_rows_are_hidden():
    labels = torch.full((16,), -100)
    labels[:2] = torch.tensor([3, 4])
    tensors = [NamedTensor("batch", labels)]
    counts = counts_of(tensors, 16)
    _, (count, *_) = orders_of_rows(tensors, counts, [[4] * 4])
    assert count.words == "labels that are not -100"


@pytest.mark.parametrize(
    ("rows", "count", "equal", "sizes"),
    [
        (16, 4, False, [6, 5, 3, 2]),
        (16, 4, True, [4, 4, 4, 4]),
        (7, 2, False, [5, 2]),
        (5, 5, False, [1] * 5),
        (6, 1, False, [6]),
    ],
)
def test_sizes_fall_unless_equal(rows, count, equal, sizes):
    found = cut_into_parts(range(rows), count, equal=equal)
    assert [len(part) for part in found] == sizes
    assert [row for part in found for row in part] == list(range(rows))


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("equal", [True, False])
def test_parts_cut_in_order_none_empty(parts, equal):
    rows = list(range(parts * 3))
    cuts = cut_into_parts(rows, parts, equal=equal)
    assert [row for part in cuts for row in part] == rows
    sizes = [len(part) for part in cuts]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) > 0
    assert (len(set(sizes)) == 1) == (equal or parts == 1)


def test_equal_parts_with_rest_refused():
    with pytest.raises(ValueError, match="7 rows cannot be cut into 2 equal parts"):
        cut_into_parts(range(7), 2, equal=True)
