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
    actual = {"weight": numbers(1, -3), "bias": numbers(3)}
    errors = gradients.relative_errors(actual, RIGHT, 1e-6)
    assert errors == {"weight": 0.25, "bias": 0.5}
    assert gradients.largest_error(errors) == (0.5, "bias")


def test_first_of_equal_errors_is_named():
    errors = {"scale": 0.1, "weight": 0.5, "bias": 0.5 * (1 + 1e-9)}
    assert gradients.largest_error(errors) == (errors["bias"], "weight")


@pytest.mark.parametrize(("limit", "error"), [(1e-3, 2.5e-8), (1e-6, 2.5e-6)])
def test_scale_at_least_a_part_of_max(limit, error):
    """The bias is rounding: 1e-9 beside 4 counts as 1e-9 / 0.04, in float64 / 4e-4."""
    expected = {"weight": numbers(1, -4), "bias": numbers(0)}
    actual = {"weight": numbers(1, -4), "bias": numbers(1e-9)}
    errors = gradients.relative_errors(actual, expected, limit)
    assert errors["bias"] == pytest.approx(error)


def test_nan_is_an_infinite_error():
    actual = {**RIGHT, "bias": numbers(math.nan)}
    errors = gradients.relative_errors(actual, RIGHT, 1e-6)
    assert gradients.largest_error(errors) == (math.inf, "bias")


def test_zero_if_no_gradient_has_an_entry():
    assert gradients.is_zero({"weight": numbers(0, 0), "bias": numbers(0)})
    assert not gradients.is_zero({"weight": numbers(0, 0), "bias": numbers(math.nan)})


def test_zeros_for_all_that_any_result_has():
    """A shard differs in its shape, so it cannot be compared."""
    other = {"weight": numbers(1, 2), "scale": numbers(3)}
    assert gradients.zeros_of_all([RIGHT, other]).keys() == {"weight", "bias", "scale"}
    shards = {"weight": numbers(1)}
    zeros = gradients.zeros_of_all([RIGHT, shards])
    assert {name: zero.tolist() for name, zero in zeros.items()} == {"bias": [0]}


def test_joined_in_order_of_names():
    assert gradients.joined(RIGHT).tolist() == [1, -4, 2]
    assert gradients.joined(RIGHT, ["bias"]).tolist() == [2]


def test_three_names_listed_others_counted():
    assert gradients.first_names(["a", "b", "c"]) == "a, b, c"
    assert gradients.first_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
