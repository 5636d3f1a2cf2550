"""The command line, `python -m scatterpar`: `train`, `doctor`, `demo`, …."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from importlib.util import find_spec
from typing import NoReturn

import scatterpar

_USAGE = (
    "usage: python -m scatterpar {train, doctor, demo} "
    "[options] (each has a --help); --version"
)
_HELP = f"""{_USAGE}

  train    train a network on images, with all GPUs of this machine; without options
           on the included ones, half a minute on two cores
  doctor   what this machine has, whether copies between its devices arrive intact, and
           whether a step is exact
  demo     one batch, accumulated by hand and by the engine, and what each copies"""
_MODULES = {
    "train": "train",
    "doctor": "checkup.doctor",
    "demo": "checkup.demo",
}
_NEEDED_TO_TRAIN = ("matplotlib", "PIL", "tqdm")


def main(arguments: list[str]) -> int:
    """Run the command named by the first argument and return the process's exit
    code.
    """
    command, *options = arguments or [""]
    if command in ("-h", "--help", "help"):
        print(_HELP)
        return 0
    if not command:
        print(_HELP)
        return 2
    if command == "--version" or (command == "train" and "--version" in options):
        torch = importlib.import_module("torch")
        print(f"scatterpar {scatterpar.__version__}, torch {torch.version.__version__}")
        return 0
    problem = _why_not(command)
    if problem:
        print(f"scatterpar: error: {problem}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"scatterpar.{_MODULES[command]}").main(options)
    return code


def _why_not(command: str) -> str:
    """Return why there is no such command, or the package that it lacks, or nothing."""
    if command not in _MODULES:
        similar = difflib.get_close_matches(command, _MODULES, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        return f"there is no command {command!r}{hint}; {_USAGE}"
    if command == "train":
        for name in _NEEDED_TO_TRAIN:
            if not find_spec(name):
                return (
                    f"{name} is not installed, which train needs: pip install -c "
                    "constraints.txt -e '.[train]' where you cloned scatterpar"
                )
    return ""


def _end(number: int, _: object) -> NoReturn:
    """End at once, with a line. An exception could be lost in the middle
    of an import.
    """
    name = f"ended by {signal.Signals(number).name}"
    if number == signal.SIGINT:
        name = "interrupted"
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
