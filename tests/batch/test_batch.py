"""A batch as a flat list of atoms: what is selected, moved, and put together."""

from __future__ import annotations

import pytest
import torch

from scatterpar import Replicated, Rows
from scatterpar.batch.batch import batch_of

IDS = torch.arange(12).reshape(4, 3)
TEXTS = ["a", "b", "c", "d"]
TABLE = torch.ones(9, 9)


def batch_of_every_kind():
    inputs = {"ids": IDS, "texts": Rows(TEXTS), "rate": torch.tensor(0.5)}
    targets = (IDS[:, 0], [Replicated(TABLE), "mean"])
    return batch_of(inputs, targets, 4, 0)


@pytest.mark.parametrize("rows", [range(1, 3), [3, 0]])
def test_rows_selected_others_stay(rows):
    inputs, targets = batch_of_every_kind().select(rows).unwrapped()
    assert inputs["ids"].tolist() == IDS[list(rows)].tolist()
    assert inputs["texts"] == [TEXTS[row] for row in rows]
    assert inputs["rate"] == 0.5
    assert targets[0].tolist() == IDS[list(rows), 0].tolist()
    assert targets[1][0] is TABLE
    assert targets[1][1] == "mean"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_rows_selected(dtype):
    labels = IDS[:, 0].to(dtype)
    inputs, _ = batch_of((labels, IDS.to(dtype)), None, 4, 0).select([3, 0]).unwrapped()
    assert [tensor.long().tolist() for tensor in inputs] == [
        [9, 0],
        [[9, 10, 11], [0, 1, 2]],
    ]


def test_range_gives_views_numbers_copied():
    batch = batch_of_every_kind()
    inputs, _ = batch.select(range(1, 3)).unwrapped()
    assert inputs["ids"].data_ptr() == IDS[1:].data_ptr()
    assert inputs["rate"] is not batch.inputs["rate"]


def test_unwrapped_copy_shares_no_memory():
    batch = batch_of_every_kind()
    inputs, targets = batch.unwrapped(copy=True)
    pairs = [
        (inputs["ids"], IDS),
        (inputs["rate"], batch.inputs["rate"]),
        (targets[1][0], TABLE),
    ]
    for copy, original in pairs:
        assert copy.data_ptr() != original.data_ptr()
        assert torch.equal(copy, original)


def test_functions_get_atoms_by_kind():
    batch = batch_of_every_kind()
    seen = {"rows": [], "values": []}
    batch.map_rows(lambda atom: seen["rows"].append(atom) or atom)
    batch.map_values(lambda atom: seen["values"].append(atom) or atom)
    kinds = {name: [type(atom).__name__ for atom in seen[name]] for name in seen}
    assert kinds == {
        "rows": ["Tensor", "Rows", "Tensor"],
        "values": ["Tensor", "Replicated"],
    }


def test_batch_without_inputs_or_targets():
    batch = batch_of_every_kind()
    inputs, nothing = batch.without_targets().unwrapped()
    assert list(inputs) == ["ids", "texts", "rate"]
    assert nothing is None
    nothing, targets = batch.without_inputs().select([2]).unwrapped()
    assert nothing is None
    assert targets[0].tolist() == [6]
    assert batch.without_targets().has_marked_rows
    assert not batch.without_inputs().has_marked_rows
