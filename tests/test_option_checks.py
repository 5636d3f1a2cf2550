"""Values of options that are refused, and their words."""

from __future__ import annotations

import math

import pytest

from scatterpar.option_checks import check_int, check_number, check_shares

pytestmark = pytest.mark.core

NO_INTS = [
    (True, TypeError, "accum must be an int or 'auto', got True"),
    (2.0, TypeError, "got 2.0"),
    ("2", TypeError, "got '2'"),
    (0, ValueError, "accum must be at least 1, got 0"),
]


@pytest.mark.parametrize(("value", "kind", "words"), NO_INTS)
def test_non_integers_refused(value, kind, words):
    with pytest.raises(kind, match=words):
        check_int("accum", value, 1, " or 'auto'")
    check_int("accum", 1, 1)
    check_int("dim", -3)


NO_NUMBERS = [
    (False, TypeError, "must be a number, got False; a remedy"),
    (None, TypeError, "must be a number"),
    (0.0, ValueError, "must be positive and finite, got 0.0; a remedy"),
    (-1, ValueError, "positive and finite"),
    (math.inf, ValueError, "positive and finite"),
    (math.nan, ValueError, "positive and finite"),
]


@pytest.mark.parametrize(("value", "kind", "words"), NO_NUMBERS)
def test_non_numbers_refused(value, kind, words):
    with pytest.raises(kind, match=words):
        check_number("lr", value, "; a remedy")
    check_number("lr", 1e-300)


def test_zero_may_be_allowed():
    check_number("weight_decay", 0.0, zero=True)
    with pytest.raises(ValueError, match="finite and not negative, got -1"):
        check_number("weight_decay", -1, zero=True)


NO_SHARES = [
    ("31", TypeError, "a list with one number per replica, got '31'"),
    (3, TypeError, "got 3"),
    ([1, 0], ValueError, "each of shares must be positive .* out of device_ids"),
    ([1, 2, 3], ValueError, "3 entries; pass one number for each of the 2 replicas"),
]


@pytest.mark.parametrize(("shares", "kind", "words"), NO_SHARES)
def test_wrong_shares_refused(shares, kind, words):
    with pytest.raises(kind, match=words):
        check_shares(shares, 2)


def test_shares_are_equal_by_default():
    assert check_shares([3, 1], 2) == (3, 1)
    assert check_shares(None, 2) == (1.0, 1.0)
