"""The options of `python -m scatterpar doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scatterpar.checkup.doctor import doctor
from scatterpar.devices.verbs import DeviceLike

__all__ = ["main"]

_PROGRAM = "scatterpar doctor"


def main(arguments: Sequence[str]) -> int:
    """Examine the machine; return the exit code.

    0: nothing is wrong; 1: something is; 2: an argument is wrong, with one line on stderr that
    says what; 130: interrupted.
    """
    given = _parser().parse_args(arguments)  # ends the process with 2 itself
    try:
        return doctor(_devices(given.devices), given.json).exit_code
    except (ValueError, TypeError, OSError) as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return 130


def _devices(given: Sequence[str] | None) -> list[DeviceLike] | None:
    """Names between commas or spaces; numbers are accelerators.

    >>> _devices(["0,1"]), _devices(["cpu:0", "cpu:1"]), _devices(None)
    ([0, 1], ['cpu:0', 'cpu:1'], None)
    """
    if given is None:
        return None
    names = [name.strip() for words in given for name in words.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_PROGRAM}",
        description="Examine this machine: what it has, whether copies between devices arrive as "
        "they were sent, whether a step on all devices is exact, how fast it is, and what to do.",
        epilog="exit code: 0 nothing is wrong, 1 something is, 2 an argument is wrong",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        metavar="DEVICE",
        help="one for each replica, such as cuda:0,cuda:1 or cpu:0 cpu:1; default: every "
        "accelerator, or two virtual devices (cpu:0,cpu:1) without any",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    return parser
