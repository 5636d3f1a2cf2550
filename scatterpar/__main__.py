"""The command line: `python -m scatterpar` with `train`, `predict`, `doctor` or `demo`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from importlib.util import find_spec
from typing import NoReturn

import scatterpar

_USAGE = (
    "usage: python -m scatterpar {train, predict, doctor, demo} [options] (each has a "
    "--help); --version"
)
_MODULES = {
    "train": "train.run",
    "predict": "train.predict",
    "doctor": "checkup.doctor",
    "demo": "checkup.demo",
}


def main(arguments: list[str]) -> int:
    """Run the command named by the first argument and return the
    process's exit code.
    """
    command, *options = arguments or [""]
    is_tool = command in ("train", "predict")
    if command in ("-h", "--help"):
        print(_USAGE)
        return 0
    if command == "--version" or (is_tool and "--version" in options):
        torch = importlib.import_module("torch")
        print(f"scatterpar {scatterpar.__version__}, torch {torch.version.__version__}")
        return 0
    missing = [
        n for n in ("matplotlib", "PIL", "tqdm", "tyro") if is_tool and not find_spec(n)
    ]
    if command in _MODULES and not missing:
        code: int = importlib.import_module(f"scatterpar.{_MODULES[command]}").main(
            options
        )
        return code
    problem = f"there is no command {command!r}" if command else "a command is missing"
    problem += f"; {_USAGE}"
    if missing:
        problem = (
            f"{missing[0]} is not installed, which the training tool needs: pip "
            "install "
            "-c constraints.txt -e '.[train]' where you cloned scatterpar"
        )
    print(f"scatterpar: error: {problem}", file=sys.stderr)
    return 2


def _end(number: int, _: object) -> NoReturn:
    """End at once, with a line. An exception could be lost in the middle
    of an import.
    """
    name = (
        "interrupted"
        if number == signal.SIGINT
        else f"ended by {signal.Signals(number).name}"
    )
    os.write(2, f"scatterpar: {name}\n".encode())
    os._exit(128 + number)


def run() -> NoReturn:
    """Be the program: `scatterpar` and `python -m scatterpar`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # as in a shell's background job
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head`, which has read enough
        # it is flushed at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    run()
