"""Gradients compared by name, with numbers that can be computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from scatterpar.splitting import gradients


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


RIGHT = {"weight": numbers(1, -4), "bias": numbers(2)}


def test_errors_relative_to_largest_entry():
    actual = {"weight": numbers(1, -3), "bias": numbers(2.5)}
    assert gradients.relative_errors(actual, RIGHT) == {"weight": 0.25, "bias": 0.25}
    assert gradients.largest_error({**actual, "bias": numbers(3)}, RIGHT) == (
        0.5,
        "bias",
    )


def test_scale_at_least_a_hundredth_of_max():
    """The bias is rounding: 1e-9 beside 4 counts as 1e-9 / 0.04."""
    expected = {"weight": numbers(1, -4), "bias": numbers(0)}
    actual = {"weight": numbers(1, -4), "bias": numbers(1e-9)}
    errors = gradients.relative_errors(actual, expected)
    assert errors["bias"] == pytest.approx(2.5e-8)


def test_nan_is_an_infinite_error():
    actual = {**RIGHT, "bias": numbers(math.nan)}
    assert gradients.largest_error(actual, RIGHT) == (math.inf, "bias")


def test_parameters_beyond_limit_are_named():
    actual = {"weight": numbers(1, -4.004), "bias": numbers(2.1)}
    assert gradients.differing(actual, RIGHT, 0.01) == ["bias"]
    assert gradients.differing(actual, RIGHT, 0.0001) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("bias", "is_zero", "is_usable"),
    [(0.0, True, False), (1.0, False, True), (math.nan, False, False)],
)
def test_usable_if_finite_and_not_zero(bias, is_zero, is_usable):
    found = {"weight": numbers(0, 0), "bias": numbers(bias)}
    assert gradients.is_zero(found) == is_zero
    assert gradients.is_usable(found) == is_usable


def test_joined_in_order_of_names():
    assert gradients.joined(RIGHT).tolist() == [1, -4, 2]
    assert gradients.joined(RIGHT, ["bias"]).tolist() == [2]


def test_factor_is_found_if_there_is_one():
    assert gradients.factor_between(numbers(3, -6), numbers(1, -2), 1e-9) == 3
    assert gradients.factor_between(numbers(3, -5), numbers(1, -2), 1e-9) is None
    assert gradients.factor_between(numbers(1, 1), numbers(0, 0), 1e-9) is None


# Parts of 1, 0 and 2: the second one has no gradient.
PARTS = [numbers(1, 0, 1, 0, 2, 0), numbers(*[0] * 6), numbers(0, 1, 0, 1, 0, 3)]


def test_weights_of_parts_are_found():
    total = numbers(0.25, 2, 0.25, 2, 0.5, 6)
    weights = gradients.weights_of_parts(PARTS, total, 1e-9)
    torch.testing.assert_close(weights, numbers(0.25, 0, 2))


def test_other_total_has_no_weights():
    assert gradients.weights_of_parts(PARTS, numbers(1, 2, 3, 4, 5, 6), 1e-9) is None


def test_several_explanations_are_none():
    """Two parts alike, and three parts of a model with five numbers."""
    alike = [PARTS[0], 2 * PARTS[0]]
    assert gradients.weights_of_parts(alike, 3 * PARTS[0], 1e-9) is None
    short = [part[:5] for part in PARTS]
    assert gradients.weights_of_parts(short, short[0], 1e-9) is None


def test_weight_of_rounding_is_zero():
    total = PARTS[0] + 1e-12 * PARTS[2]
    weights = gradients.weights_of_parts(PARTS, total, 1e-5)
    assert weights.tolist()[1:] == [0, 0]
