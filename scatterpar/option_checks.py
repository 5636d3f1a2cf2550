"""Refuse values of options of another kind, or out of their range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def check_int(name: str, value: Any, least: int | None = None, also: str = "") -> None:
    """Refuse what is no int, or below ``least``.

    ``also`` names other values that are allowed.
    """
    # A bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{also}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_bool(name: str, value: Any) -> None:
    """Refuse what is not ``True`` or ``False``, such as the text ``"no"``."""
    if value not in (True, False):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(
    name: str, value: Any, remedy: str = "", *, zero: bool = False
) -> None:
    """Refuse what is no finite number above zero.

    With ``zero``, zero is allowed, too. ``remedy`` ends the error.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}{remedy}")
    is_in_range = 0 <= value < math.inf  # not NaN, which is in no range
    if not is_in_range or (value == 0 and not zero):
        kind = "finite and not negative" if zero else "positive and finite"
        raise ValueError(f"{name} must be {kind}, got {value!r}{remedy}")


def check_shares(shares: Any, count: int) -> tuple[float, ...]:
    """The relative sizes of ``count`` shares, equal if ``shares`` is ``None``."""
    if shares is None:
        return (1.0,) * count
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise TypeError(
            f"shares must be a list with one number per replica, got {shares!r}"
        )
    remedy = "; leave a device without rows out of device_ids"
    for share in shares:
        check_number("each of shares", share, remedy)
    if len(shares) != count:
        raise ValueError(
            f"shares has {len(shares)} entries; pass one number for each of the "
            f"{count} replicas"
        )
    return tuple(shares)
