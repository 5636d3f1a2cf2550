"""Random operators that give each row the same, however many rows there are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from scatterpar.verify.constant_numbers import ConstantNumbers, DrawsPerRow

pytestmark = pytest.mark.draws


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_all_numbers_are_the_same_for_any_number_of_rows(draw):
    with ConstantNumbers() as numbers:
        few, many = draw(2, 3), draw(5, 3)
    values = {*few.flatten().tolist(), *many.flatten().tolist()}
    assert [round(value, 3) for value in values] == [0.618]
    assert numbers.calls == 2


def test_native_dropout_keeps_all_elements_and_is_no_call():
    rows = torch.arange(6.0)
    with ConstantNumbers() as numbers:
        dropped, mask = torch.native_dropout(rows, 0.5, True)
    assert torch.equal(dropped, rows)
    assert mask.all()
    assert numbers.calls == 0


def test_dropout_by_a_mask_treats_all_elements_alike():
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
def test_what_depends_on_the_number_of_rows_is_refused(draw):
    with ConstantNumbers(), pytest.raises(DrawsPerRow, match="depend on the rows"):
        draw()


def test_a_mask_of_probabilities_is_no_dropout():
    """``bernoulli`` has an argument ``p``, too."""
    with ConstantNumbers() as numbers:
        torch.empty(3).bernoulli_(0.25)
    assert numbers.calls == 1


def test_what_draws_nothing_is_as_without_it():
    with ConstantNumbers() as numbers:
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
    assert numbers.calls == 0
