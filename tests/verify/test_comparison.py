"""Losses and gradients beside each other, with numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from scatterpar.verify import comparison
from scatterpar.verify.comparison import Result, relative_difference, weighted_sum


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def result(loss, *gradient):
    return Result(loss, [numbers(*gradient)])


def test_a_sum_multiplies_losses_and_gradients_by_their_weights():
    total = weighted_sum([result(4.0, 1, 2), result(8.0, 0, 10)], [0.75, 0.25])
    assert total.loss == 5
    assert total.gradients[0].tolist() == [0.75, 4]
    assert weighted_sum([result(4.0, 1), result(8.0, 2)]).gradients[0].item() == 3


def test_a_result_without_weight_adds_nothing_even_if_it_is_no_number():
    total = weighted_sum([result(math.nan, math.nan), result(2.0, 3)], [0.0, 1.0])
    assert (total.loss, total.gradients[0].item()) == (2, 3)


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([1, 4], [1, 5], 0.2),
        ([0, 0], [0, 0], 0.0),
        ([math.nan, 4], [1, 5], math.inf),
        (None, [0, 0], 0.0),
        (None, [0, 1], math.inf),
        ([0, 1], None, math.inf),
    ],
)
def test_a_difference_is_a_part_of_the_largest_entry(actual, expected, difference):
    pair = [
        None if values is None else [numbers(*values)] for values in (actual, expected)
    ]
    found, _ = relative_difference(*([None] if each is None else each for each in pair))
    assert found == pytest.approx(difference)


def test_the_worst_of_several_gradients_is_numbered():
    actual = [numbers(1), numbers(2), numbers(1)]
    assert relative_difference(actual, [numbers(1), numbers(4), numbers(1.1)]) == (
        0.5,
        1,
    )


def test_no_scale_is_below_a_hundredth_of_the_largest_gradient():
    difference, _ = relative_difference(
        [numbers(8), numbers(0.02)], [numbers(8), numbers(0)]
    )
    assert difference == pytest.approx(0.02 / 0.08)


def test_results_differ_by_loss_or_gradient_whichever_is_more():
    assert result(3.0, 1, 5).difference_from(result(4.0, 1, 5)) == 0.25
    assert result(4.0, 1, 4).difference_from(result(4.0, 1, 5)) == pytest.approx(0.2)
    assert result(math.nan, 1).difference_from(result(4.0, 1)) == math.inf


def test_results_are_finite_and_have_a_gradient_or_not():
    assert result(1.0, 0, 2).is_finite
    assert not result(1.0, math.inf).is_finite
    assert not result(math.nan, 1).is_finite
    assert comparison.num_with_gradient([result(1.0, 0, 0), result(1.0, 0, 2)]) == 1


def test_magnitudes_of_missing_and_empty_tensors_are_zero():
    sparse = numbers(0, -3).to_sparse()
    assert comparison.magnitudes([numbers(1, -2), None, numbers(), sparse]) == [
        2,
        0,
        0,
        3,
    ]


@pytest.mark.parametrize(
    ("actual", "difference"),
    [
        (numbers(1, 2), 0.0),
        (numbers(1, 1), 0.5),
        (numbers(math.nan, 2), 0.5),  # as zero
    ],
)
def test_outputs_differ_by_a_part_of_the_largest_entry(actual, difference):
    assert comparison.difference_of_outputs(actual, numbers(1, 2)) == difference


def test_whole_numbers_are_equal_or_not():
    one, other = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert comparison.difference_of_outputs(one, one.clone()) == 0
    assert comparison.difference_of_outputs(one, other) == math.inf
