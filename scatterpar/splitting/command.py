"""``python -m scatterpar splitcheck FILE:FUNCTION``: a grid of checks from a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scatterpar.splitting.grid import splitgrid

_RETURNED = "step, model, batch"
_NUM_RETURNED = 3


def main(arguments: Sequence[str]) -> int:
    """Check what FUNCTION of FILE returns; print the table.

    Returns 0 if all is the same, 1 if something is not, 2 if an argument is wrong.
    """
    options = _parser().parse_args(arguments)  # exits with 2 by itself
    try:
        step, model, batch = _returned_by(options.target)
        grid = splitgrid(
            step,
            model,
            batch,
            parts=options.parts,
            ranks=options.ranks,
            timeout=options.timeout,
        )
        if options.json is not None:
            grid.to_json(options.json)
    # 1, as pytest: the loop is wrong, and not the command. First, because a timeout is
    # an ``OSError``, too.
    except (RuntimeError, TimeoutError) as error:
        print(f"scatterpar splitcheck: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError) as error:
        print(f"scatterpar splitcheck: error: {error}", file=sys.stderr)
        return 2
    print(grid)
    for cell in grid.cells:
        if not cell.report.passed:
            print(f"\n{cell}: {cell.report}")
    return 0 if grid.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar splitcheck",
        description="Is the gradient of a training loop, in parts and on ranks, that "
        "of the whole batch?",
        epilog="exit code: 0 the same, 1 not the same, 2 an argument is wrong",
    )
    words = "the function returns step, model, batch"
    parser.add_argument("target", metavar="FILE:FUNCTION", help=words)
    for name, default in (("parts", "1,4"), ("ranks", "1,2")):
        words = f"numbers of {name}, separated by commas (default: {default})"
        parser.add_argument(
            f"--{name}", type=_numbers, default=_numbers(default), help=words
        )
    words = "seconds after which ranks are killed (default: 60)"
    parser.add_argument("--timeout", type=float, default=60.0, help=words)
    words = "write all reports there"
    parser.add_argument("--json", type=Path, metavar="FILE", help=words)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _returned_by(target: str) -> tuple[Any, Any, Any]:
    """What the function of a file returns. Raises ``ValueError`` with the problem."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(
            f"{target} names no function of a file; pass FILE:FUNCTION, as "
            f"training.py:check"
        )
    # By its name, as a spawned process imports it; the file may import its neighbours.
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.import_module(path.stem)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"{file} has no function {name!r}; pass one that returns {_RETURNED}"
        )
    returned = function()
    if not isinstance(returned, tuple) or len(returned) != _NUM_RETURNED:
        raise ValueError(
            f"{name} must return {_RETURNED}, got {type(returned).__name__}"
        )
    step, model, batch = returned
    return step, model, batch
