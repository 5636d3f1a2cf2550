"""Run the benchmarks: print the tables that the READMEs show, or write them.

::

    python -m benchmarks traffic memory     some folders, in a few rounds; writes nothing
    python -m benchmarks figures            the guide's step times, the same way
    python -m benchmarks --write            all folders and rounds, half an hour on two
                                            cores; writes tables, numbers and pictures
    python -m benchmarks --quick            every line with tiny sizes
    python -m benchmarks card               a run of its own, for GPUs (``--help``)

Other arguments are pytest's, such as ``-k cnn``.
"""

import sys
from pathlib import Path

import pytest

from benchmarks.card import main as card
from benchmarks.readme import write

HERE = Path(__file__).parent
PYTEST_OPTIONS = (
    "-o",
    "addopts=",  # the project's own options skip benchmarks
    "-p",
    "no:cacheprovider",
    "-q",
    "-s",  # tables are printed as they come
    "--benchmark-disable-gc",
    "--benchmark-columns=median,iqr,rounds",
)


def main(arguments: list[str]) -> int:
    """Run what the first argument names. Returns the exit code."""
    if arguments[:1] == ["card"]:
        return card(arguments[1:])
    if arguments[:1] == ["figures"]:
        return figures(arguments[1:])
    return run_folders(arguments)


def figures(options: list[str]) -> int:
    """Measure the guide's step times. Returns the exit code.

    With ``--write`` all tables that the guide quotes are written.
    """
    code = run_folders(["step_time", "-k", "two_replicas", *options])
    if code == 0 and "--write" in options and "--quick" not in options:
        write()
    return code


def run_folders(arguments: list[str]) -> int:
    """Hand folders and options to pytest. Returns its exit code."""
    folders = []
    options = []
    for argument in arguments:
        if (HERE / argument).is_dir():
            folders.append(str(HERE / argument))
        else:
            options.append(argument)
    return pytest.main([*PYTEST_OPTIONS, *options, *(folders or [str(HERE)])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
