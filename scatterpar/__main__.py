"""The command line: `python -m scatterpar` with `train`, `predict` or `doctor`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

import scatterpar

_USAGE = (
    "usage: python -m scatterpar {train, predict, doctor} [options] (each has a --help); --version"
)


def main(arguments: list[str]) -> int:
    """Run the command named by the first argument and return the process's exit code."""
    command, *options = arguments or [""]
    if command in ("train", "predict"):
        return _tool(command, options)
    if command == "doctor":
        from scatterpar.checkup.doctor import main as doctor

        return doctor(options)
    if command == "--version":
        torch = importlib.import_module("torch")
        print(f"scatterpar {scatterpar.__version__}, torch {torch.version.__version__}")
        return 0
    if command in ("-h", "--help"):
        print(_USAGE)
        return 0
    problem = f"there is no command {command!r}" if command else "a command is missing"
    print(f"scatterpar: error: {problem}; {_USAGE}", file=sys.stderr)
    return 2


def _tool(command: str, options: list[str]) -> int:
    """Run a command of the training tool, which needs more than the engine to be installed."""
    if "--version" in options:
        return main(["--version"])
    try:
        for name in ("matplotlib", "PIL", "tqdm", "tyro"):
            importlib.import_module(name)
    except ImportError as error:
        print(
            f"scatterpar: error: {error.name} is not installed, which the training tool needs: "
            "pip install -c constraints.txt -e '.[train]' where you cloned scatterpar",
            file=sys.stderr,
        )
        return 2
    module = "run" if command == "train" else command
    code: int = importlib.import_module(f"scatterpar.train.{module}").main(options)
    return code


def _end(number: int, _: object) -> NoReturn:
    """End at once, with a line. An exception could be lost in the middle of an import."""
    name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    os.write(2, f"scatterpar: {name}\n".encode())
    os._exit(128 + number)


def run() -> NoReturn:
    """Be the program: `scatterpar` and `python -m scatterpar`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background job
            signal.signal(number, _end)
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at exit, too
        sys.exit(1)


if __name__ == "__main__":
    run()
