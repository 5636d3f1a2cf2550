"""Random operators that give each row the same, however many rows there are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from scatterpar.verify.comparison import Inconclusive
from scatterpar.verify.constant_numbers import ConstantNumbers

pytestmark = pytest.mark.draws


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_numbers_same_for_any_rows(draw):
    with ConstantNumbers() as numbers:
        few, many = draw(2, 3), draw(5, 3)
    values = {*few.flatten().tolist(), *many.flatten().tolist()}
    assert [round(value, 3) for value in values] == [0.618]
    assert numbers.calls == 2


def test_native_dropout_keeps_all_elements():
    rows = torch.arange(6.0)
    with ConstantNumbers() as numbers:
        dropped, mask = torch.native_dropout(rows, 0.5, True)
    assert torch.equal(dropped, rows)
    assert mask.all()
    assert numbers.calls == 0


def test_masked_dropout_treats_all_alike():
    with ConstantNumbers():
        dropped = F.dropout(torch.ones(2, 3), 0.5)
    assert len(dropped.unique()) == 1
    assert dropped.all()


def test_integers_repeat_the_first():
    with ConstantNumbers():
        drawn = torch.randint(1000, (4,))
        empty = torch.randint(1000, (0,))
    assert len(drawn.unique()) == 1
    assert empty.numel() == 0


@pytest.mark.parametrize(
    "draw", [lambda: torch.randperm(4), lambda: torch.multinomial(torch.ones(4), 2)]
)
def test_draws_that_depend_on_rows_refused(draw):
    with ConstantNumbers(), pytest.raises(Inconclusive, match="depends on the rows"):
        draw()


def test_bernoulli_mask_is_no_dropout():
    """``bernoulli`` has an argument ``p``, too."""
    with ConstantNumbers() as numbers:
        torch.empty(3).bernoulli_(0.25)
    assert numbers.calls == 1


def test_other_operators_unchanged():
    with ConstantNumbers() as numbers:
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
    assert numbers.calls == 0
