"""Run the benchmarks and write the tables and pictures that the READMEs show.

``python -m benchmarks`` runs all of them, ``python -m benchmarks traffic memory`` some,
and ``--quick`` goes through every line in a minute or two, with tiny sizes, and writes
nothing. Other arguments are pytest's. ``python -m benchmarks figures`` measures the
guide's table of step times, and writes it: under 12 minutes on two quiet cores.
``python -m benchmarks card`` is a run of its own, for machines with cards (``--help``
says how).
"""

import sys
from pathlib import Path

import pytest

from benchmarks.card import main as card
from benchmarks.readme import write

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Hand the folders to pytest, with the project's own options (which skip
    benchmarks) off.
    """
    if arguments[:1] == ["card"]:
        return card(arguments[1:])
    if arguments[:1] == ["figures"]:
        more = arguments[1:]
        status = main(["step_time", "-k", "two_replicas", *more])
        if not status and "--quick" not in more:
            write()
        return status
    folders = [str(HERE / name) for name in arguments if (HERE / name).is_dir()]
    options = [option for option in arguments if not (HERE / option).is_dir()]
    fixed = [
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-q",
        "-s",
        "--benchmark-disable-gc",
    ]
    shown = "--benchmark-columns=median,iqr,rounds"
    return pytest.main([*fixed, shown, *options, *(folders or [str(HERE)])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
