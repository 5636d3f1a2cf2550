"""``python -m scatterpar splitcheck FILE:FUNCTION``: a grid of checks from a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from scatterpar.splitting.grid import check_all, trials_of_cells
from scatterpar.splitting.split_arguments import SplitArguments

_RETURNED = "step, model, batch"


def main(arguments: Sequence[str]) -> int:
    """Check what FUNCTION of FILE returns; print the table.

    Returns 0 if all is the same, 1 if something is not. Ends with 2 if an argument is
    wrong. What the user's code raises stays as it is: Python prints it, and ends with
    1.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    file, _, name = options.target.rpartition(":")
    path = Path(file)
    # Before the checks, which may take minutes.
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} for --json; make it")
    function = None
    if path.suffix == ".py" and path.is_file():
        # By its name, as a spawned process imports it; the file may import others.
        sys.path.insert(0, str(path.parent.resolve()))
        function = getattr(importlib.import_module(path.stem), name, None)
    if not callable(function):
        parser.error(
            f"{options.target} names no function of a file; pass FILE:FUNCTION, as "
            f"training.py:check, which returns {_RETURNED}"
        )
    returned = function()
    try:
        step, model, batch = returned
    except (TypeError, ValueError):
        kind = type(returned).__name__
        parser.error(f"{name} must return {_RETURNED}, got {kind}")
    try:
        shared = SplitArguments(
            step, model, batch, ranks=1, equal=True, timeout=options.timeout
        )
        trials = trials_of_cells(shared, options.parts, options.ranks)
    except (TypeError, ValueError) as error:  # the user's step has not run yet
        parser.error(str(error))
    grid = check_all(trials)
    print(grid)
    for cell in grid.cells:
        if not cell.report.passed:
            print(f"\n{cell}: {cell.report}")
    if options.json is not None:
        grid.to_json(options.json)
    return 0 if grid.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar splitcheck",
        description="Is the gradient of a training loop, in parts and on ranks, that "
        "of the whole batch?",
        epilog="exit code: 0 the same, 1 not the same, 2 an argument is wrong",
    )
    words = f"the function returns {_RETURNED}"
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
