"""The command line: `python -m scatterpar` with `train`, `predict` or `doctor`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_USAGE = "usage: python -m scatterpar {train, predict, doctor} [options] (each has a --help)"


def main(arguments: list[str]) -> int:
    """Run the command named by the first argument and return the process's exit code."""
    match arguments:
        case ["train", *options]:
            from scatterpar.train.cli import main as train

            return train(options)
        case ["predict", *options]:
            from scatterpar.train.predict import main as predict

            return predict(options)
        case ["doctor", *options]:
            from scatterpar.checkup.doctor import main as doctor

            return doctor(options)
        case ["-h" | "--help", *_]:
            print(_USAGE)
            return 0
        case [unknown, *_]:
            print(f"scatterpar: error: there is no command {unknown!r}; {_USAGE}", file=sys.stderr)
            return 2
        case _:
            print(f"scatterpar: error: a command is missing; {_USAGE}", file=sys.stderr)
            return 2


def leave(code: int) -> NoReturn:
    """End the process, under torchrun without the interpreter's own last steps.

    During these gloo's threads can abort a process whose work is done, and torchrun would
    start a finished job again.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> NoReturn:
    """Be the program: `scatterpar` and `python -m scatterpar`."""
    try:
        leave(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted before training began", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
