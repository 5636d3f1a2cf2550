"""What a loss may divide by, counted per row."""

from __future__ import annotations

import pytest
import torch

from scatterpar import Rows
from scatterpar.causes.counts import counts_of, named_tensors

LABELS = torch.tensor([[1, -100, -100], [1, 2, 3], [-100, 4, -100]])


def counted(batch):
    return {count.words: count for count in counts_of(named_tensors(batch), 3)}


def test_labels_before_integers_before_floats():
    ids = torch.zeros(3, 2, dtype=torch.long)
    weights = torch.tensor([0.5, 0.0, 0.9])
    batch = {"weights": weights, "ids": ids, "labels": LABELS}
    counts = counts_of(named_tensors(batch), 3)
    paths = dict.fromkeys(count.path for count in counts)
    assert list(paths) == [
        "",
        *(f'batch["{key}"]' for key in ("labels", "ids", "weights")),
    ]


def test_rows_count_elements_of_entries():
    (named,) = named_tensors(Rows([torch.ones(3), torch.ones(2, 2)], list))
    assert named.tensor.tolist() == [3, 4]


def test_terms_are_counted_by_row():
    counts = counted([LABELS])
    assert counts["rows"].per_row == (1, 1, 1)
    labels = counts["labels that are not -100"]
    assert labels.per_row == (1, 3, 1)
    assert labels.path == "batch[0]"
    assert labels.is_selective
    assert labels.of([1, 2]) == 4
    first = counts["labels that are not -100, without the first of a row"]
    assert first.per_row == (0, 2, 1)
    last = counts["labels that are not -100, without the last of a row"]
    assert last.per_row == (1, 2, 1)
    assert not counts["labels that are not 255"].is_selective


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float16])
def test_entries_of_masks_are_counted(dtype):
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).to(dtype)
    counts = counted(mask)
    assert counts["entries that are not 0"].per_row == (2, 1, 0)
    assert counts["entries that are 0"].per_row == (0, 1, 2)
    assert counted(torch.ones(3, 2))["entries that are not 0"].is_selective


def test_weights_and_lengths_are_summed():
    assert counted(torch.tensor([3, 1, 2]))["sum of batch"].per_row == (3, 1, 2)
    weights = torch.tensor([[0.5, 1.0], [0.0, 0.0], [2.0, 0.5]])
    assert counted({"w": weights})['sum of batch["w"]'].per_row == (1.5, 0, 2.5)
    assert "sum of batch" not in counted(-weights)
