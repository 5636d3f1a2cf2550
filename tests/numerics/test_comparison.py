"""Losses and gradients beside each other, with numbers computed by hand."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from scatterpar.numerics import comparison
from scatterpar.numerics.comparison import Result, relative_difference, weighted_sum


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def result(loss, *gradient):
    return Result(loss, [numbers(*gradient)])


def test_magnitudes_of_several_dtypes_stay_in_order():
    """One copy to the host brings those of each dtype."""
    tensors = [numbers(1, -2), torch.tensor([3.5]), None, numbers(-4)]
    tensors += [torch.tensor([-5.0, 1]), torch.tensor([6], dtype=torch.bfloat16)]
    assert comparison.magnitudes(tensors) == [2, 3.5, 0, 4, 5, 6]
    assert math.isnan(comparison.magnitudes([torch.tensor([torch.nan])])[0])
    assert comparison.magnitudes([]) == []


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
    total = comparison.NOTHING.plus(result(1.0, 2)).plus(Result(3.0, []))
    assert (total.loss, total.gradients[0].item()) == (4, 2)


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
def test_difference_relative_to_largest(actual, expected, difference):
    pair = [
        None if values is None else [numbers(*values)] for values in (actual, expected)
    ]
    found = relative_difference(*([None] if each is None else each for each in pair))
    assert found == pytest.approx(difference)


def test_worst_gradient_counts():
    actual = [numbers(1), numbers(2), numbers(1)]
    expected = [numbers(1), numbers(4), numbers(1.1)]
    assert relative_difference(actual, expected) == 0.5
    assert comparison.relative_differences(actual, expected)[:2] == [0, 0.5]


def test_scale_at_least_a_hundredth_of_max():
    difference = relative_difference(
        [numbers(8), numbers(0.02)], [numbers(8), numbers(0)]
    )
    assert difference == pytest.approx(0.02 / 0.08)


def test_results_differ_by_the_larger_part():
    """Results differ by loss or gradient, whichever is more."""
    assert result(3.0, 1, 5).difference_from(result(4.0, 1, 5)) == 0.25
    assert result(4.0, 1, 4).difference_from(result(4.0, 1, 5)) == pytest.approx(0.2)
    assert result(math.nan, 1).difference_from(result(4.0, 1)) == math.inf


def test_results_finite_with_gradient():
    assert result(1.0, 0, 2).is_finite
    assert not result(1.0, math.inf).is_finite
    assert not result(math.nan, 1).is_finite
    assert [result(1.0, 0, size).has_gradient for size in (0, 2)] == [False, True]


def test_magnitude_of_no_tensor_is_zero():
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
def test_outputs_relative_to_largest_entry(actual, difference):
    assert comparison.difference_of_outputs(actual, numbers(1, 2)) == difference


def test_integers_equal_or_infinitely_off():
    one, other = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert comparison.difference_of_outputs(one, one.clone()) == 0
    assert comparison.difference_of_outputs(one, other) == math.inf


def test_sum_keeps_no_gradient_of_a_summand():
    total = comparison.NOTHING
    gradients = []
    for number in range(3):
        summand = result(1.0 + number, number, 2)
        gradients.append(weakref.ref(summand.gradients[0]))
        total = total.plus(summand)
        del summand
    assert total.loss == 6
    assert total.gradients[0].tolist() == [3, 6]
    assert [gradient() for gradient in gradients] == [None] * 3
