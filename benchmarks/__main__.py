"""Run the benchmarks and write the tables and pictures that the READMEs show.

::

    python -m benchmarks                    all folders, half an hour on two cores
    python -m benchmarks traffic memory     some folders
    python -m benchmarks --quick            every line with tiny sizes; writes nothing
    python -m benchmarks figures            the guide's step times, under 12 minutes
    python -m benchmarks card               a run of its own, for GPUs (``--help``)

Other arguments are pytest's.
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
    """Measure the guide's table of step times, and write it. Returns the exit code."""
    code = run_folders(["step_time", "-k", "two_replicas", *options])
    if code == 0 and "--quick" not in options:
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
