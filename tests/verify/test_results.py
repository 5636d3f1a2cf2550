"""Losses with their gradients, added and compared: numbers computed by hand."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from harness.small_looks import asked

from scatterpar.verify.results import NOTHING, Result, weighted_sum


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def result(loss, *gradient):
    return Result(loss, [numbers(*gradient)])


def test_sum_multiplies_by_weights():
    total = weighted_sum([result(4.0, 1, 2), result(8.0, 0, 10)], [0.75, 0.25])
    assert total.loss == 5
    assert total.gradients[0].tolist() == [0.75, 4]
    assert weighted_sum([result(4.0, 1), result(8.0, 2)]).gradients[0].item() == 3


def test_weight_zero_leaves_out_even_nan():
    total = weighted_sum([result(math.nan, math.nan), result(2.0, 3)], [0.0, 1.0])
    assert (total.loss, total.gradients[0].item()) == (2, 3)


def test_part_without_gradients_adds_its_loss():
    """Its backward pass has refused ``autograd.grad``."""
    total = NOTHING.plus(result(1.0, 2)).plus(Result(3.0, []))
    assert (total.loss, total.gradients[0].item()) == (4, 2)


def test_results_differ_by_the_larger_part():
    """Results differ by loss or gradient, whichever is more."""
    assert result(3.0, 1, 5).difference_from(result(4.0, 1, 5)) == 0.25
    assert result(4.0, 1, 4).difference_from(result(4.0, 1, 5)) == pytest.approx(0.2)
    for loss in (math.nan, math.inf):
        assert result(loss, 1).difference_from(result(4.0, 1)) == math.inf
        assert result(4.0, 1).difference_from(result(loss, 1)) == math.inf


def test_results_finite_with_gradient():
    assert result(1.0, 0, 2).is_finite
    assert not result(1.0, math.inf).is_finite
    assert not result(math.nan, 1).is_finite
    assert [result(1.0, 0, size).has_gradient for size in (0, 2)] == [False, True]


def test_sum_keeps_no_gradient_of_a_summand():
    total = NOTHING
    gradients = []
    for number in range(3):
        summand = result(1.0 + number, number, 2)
        gradients.append(weakref.ref(summand.gradients[0]))
        total = total.plus(summand)
        del summand
    assert total.loss == 6
    assert total.gradients[0].tolist() == [3, 6]
    assert [gradient() for gradient in gradients] == [None] * 3


pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_leaf_of_the_user_and_its_copy(monkeypatch):
    leaves, copies, weights = asked(
        monkeypatch,
        lambda runs: (
            runs.leaves.all(),
            runs.leaves.copies(),
            [task.module.linear.weight for task in (runs.own_task, runs.replica_task)],
        ),
    )
    assert leaves[0] is weights[0]
    assert copies[0] is weights[1]


def test_gradients_of_copies_are_added(monkeypatch):
    def question(runs):
        gradients = [torch.ones(1, 1), None]
        return runs.leaves.sums(gradients), runs.leaves.sums(())

    some, zeros = asked(monkeypatch, question)
    assert [total.item() for total in some] == [1]
    assert [total.item() for total in zeros] == [0]
