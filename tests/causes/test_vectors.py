"""Factors and weights, with numbers that can be computed by hand."""

from __future__ import annotations

import torch

from scatterpar.causes import vectors


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_factor_is_found_if_there_is_one():
    assert vectors.factor_between(numbers(3, -6), numbers(1, -2), 1e-9) == 3
    assert vectors.factor_between(numbers(3, -5), numbers(1, -2), 1e-9) is None
    assert vectors.factor_between(numbers(1, 1), numbers(0, 0), 1e-9) is None


# Parts of 1, 0 and 2: the second one has no gradient.
PARTS = [numbers(1, 0, 1, 0, 2, 0), numbers(*[0] * 6), numbers(0, 1, 0, 1, 0, 3)]


def test_weights_of_parts_are_found():
    total = numbers(0.25, 2, 0.25, 2, 0.5, 6)
    weights = vectors.weights_of_parts(PARTS, total, 1e-9)
    torch.testing.assert_close(weights, numbers(0.25, 0, 2))


def test_other_total_has_no_weights():
    assert vectors.weights_of_parts(PARTS, numbers(1, 2, 3, 4, 5, 6), 1e-9) is None


def test_several_explanations_are_none():
    """Two parts alike, and three parts of a model with five numbers."""
    alike = [PARTS[0], 2 * PARTS[0]]
    assert vectors.weights_of_parts(alike, 3 * PARTS[0], 1e-9) is None
    short = [part[:5] for part in PARTS]
    assert vectors.weights_of_parts(short, short[0], 1e-9) is None


def test_weight_of_rounding_is_zero():
    total = PARTS[0] + 1e-12 * PARTS[2]
    weights = vectors.weights_of_parts(PARTS, total, 1e-5)
    assert weights.tolist()[1:] == [0, 0]
