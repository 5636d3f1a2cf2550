"""The command line: `python -m scatterpar train`."""

from __future__ import annotations

import sys

_USAGE = "usage: python -m scatterpar train [options] (see: python -m scatterpar train --help)"


def main(arguments: list[str]) -> int:
    """Run the command named by the first argument and return the process's exit code."""
    match arguments:
        case ["train", *options]:
            from scatterpar.train.cli import main as train

            return train(options)
        case ["-h" | "--help", *_]:
            print(_USAGE)
            return 0
        case [unknown, *_]:
            print(f"scatterpar: error: there is no command {unknown!r}; {_USAGE}", file=sys.stderr)
            return 2
        case _:
            print(f"scatterpar: error: a command is missing; {_USAGE}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted before training began", file=sys.stderr)
        sys.exit(130)
