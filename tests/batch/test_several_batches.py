"""Several batches that make one step: their rows, and those that disagree."""

from __future__ import annotations

import pytest
import torch

from scatterpar import Rows
from scatterpar.batch.several_batches import batches_of

IDS = torch.arange(12).reshape(4, 3)
WINDOW = Rows.from_batches([IDS[:3], IDS[3:]])
EVEN = Rows.from_batches([IDS[:2], IDS[2:]])


def test_batches_know_their_first_rows():
    batches = batches_of(WINDOW, IDS[:, 0], 0)
    assert [(batch.first_row, batch.rows) for batch in batches] == [(0, 3), (3, 1)]
    assert batches[1].targets.tolist() == [9]


@pytest.mark.parametrize("targets", [WINDOW, IDS, None, 0.5])
@pytest.mark.parametrize("are_swapped", [False, True])
def test_rows_of_batches_with_other_part(targets, are_swapped):
    parts = (targets, WINDOW) if are_swapped else (WINDOW, targets)
    first, second = batches_of(*parts, 0)
    of_first, of_second = first.unwrapped(), second.unwrapped()
    assert torch.equal(of_first[are_swapped], IDS[:3])
    assert torch.equal(of_second[are_swapped], IDS[3:])
    other = of_second[not are_swapped]
    if isinstance(other, torch.Tensor):
        assert torch.equal(other, IDS[3:])
    else:
        assert other is targets


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (WINDOW, IDS[:3], r"inputs with 3 \+ 1, targets with 3"),
        (IDS[:3], WINDOW, r"targets with 3 \+ 1, inputs with 3"),
        (WINDOW, EVEN, r"dim=0: inputs with 3 \+ 1, targets with 2 \+ 2"),
    ],
)
def test_batches_that_disagree_refused(inputs, targets, words):
    with pytest.raises(ValueError, match=words):
        batches_of(inputs, targets, 0)
