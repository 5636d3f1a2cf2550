"""Gradients and outputs beside each other, with numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from scatterpar.numerics import comparison
from scatterpar.numerics.comparison import relative_difference


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_magnitudes_of_several_dtypes_stay_in_order():
    """One copy to the host brings those of each dtype."""
    tensors = [numbers(1, -2), torch.tensor([3.5]), None, numbers(-4)]
    tensors += [torch.tensor([-5.0, 1]), torch.tensor([6], dtype=torch.bfloat16)]
    assert comparison.magnitudes(tensors) == [2, 3.5, 0, 4, 5, 6]
    assert math.isnan(comparison.magnitudes([torch.tensor([torch.nan])])[0])
    assert comparison.magnitudes([]) == []


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


def test_magnitude_of_no_tensor_is_zero():
    sparse = numbers(0, -3).to_sparse()
    assert comparison.magnitudes([numbers(1, -2), None, numbers(), sparse]) == [
        2,
        0,
        0,
        3,
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_is_not_finite_is_infinitely_off(value):
    """It divided by zero for NaN, and every difference was zero beside infinity."""
    bad, zero, good = numbers(value), numbers(0), numbers(1)
    differences = comparison.relative_differences
    assert differences([good, zero], [bad, zero]) == [math.inf, 0]
    assert differences([bad, numbers(0.5)], [good, good]) == [math.inf, 0.5]
    assert differences([good, numbers(0.5)], [bad, good]) == [math.inf, 0.5]
    assert differences([bad], [bad]) == [math.inf]
    assert differences([None], [bad]) == [math.inf]
