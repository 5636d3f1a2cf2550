"""Values on the command line, and the words where one is wrong."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from scatterpar.train.errors import UsageError
from scatterpar.train.optimizers import keyword


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the tool's own."""

    def error(self, message: str) -> NoReturn:
        """Raise the error rather than end the process."""
        raise UsageError(f"{message} (see --help)")


def whole(text: str) -> int:
    """Read a whole number, zero or above."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, zero or above")
    return int(text)


def count(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def batch(text: str) -> int | Literal["auto"]:
    """Read `auto`, or a whole number above zero."""
    return "auto" if text == "auto" else count(text)


def seed(text: str) -> int:
    """Read a seed: a whole number below 2**31."""
    value = whole(text)
    if value >= 2**31:
        raise argparse.ArgumentTypeError(f"{text} is too large: seeds are below 2**31")
    return value


def epochs(text: str) -> tuple[int, ...]:
    """Read numbers with commas in between."""
    return tuple(count(part.strip()) for part in text.split(","))


def shares(text: str) -> tuple[float, ...] | str:
    """Read `auto`, or numbers above zero with commas in between."""
    return text if text == "auto" else tuple(number(above=0.0)(part) for part in text.split(","))


def named_value(text: str) -> tuple[str, Any]:
    """Read `name=value`."""
    try:
        return keyword(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def number(
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> Callable[[str], float]:
    """Return what reads a number within limits."""
    limits = {"above": above, "at least": least, "below": below, "at most": most}
    wanted = " and ".join(f"{word} {x:g}" for word, x in limits.items() if math.isfinite(x))

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (above < value < below and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return read
