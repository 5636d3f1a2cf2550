"""What can only be settled on GPUs, in ten minutes, on one page: ``python -m benchmarks
card``.

Rows of the page are tests, in one worker of pytest-xdist: no two processes fill the
first GPU. A row that takes too long is ended by pytest-timeout with its worker (by a
thread: a signal does not interrupt a wait for CUDA), and pytest-xdist starts another
one. README.md says what is a failure.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

# The budget of each group, and the limit of each of its rows.
BUDGETS = {
    "start": (20, 0),
    "machine": (140, 50),
    "bits": (150, 60),
    "times": (165, 60),
}
BUDGETS |= {"suite": (105, 600), "page": (20, 0)}
HERE = Path(__file__).parent  # the files of the rows
_OPTIONS = (
    *(
        "-p",
        "benchmarks.card.plugin",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ),
    *(
        "-n",
        "1",
        "--dist",
        "load",
        "--maxschedchunk",
        "1",
        "--max-worker-restart",
        "1000",
    ),
    *("-o", "faulthandler_timeout=0", "-q"),
)


def main(arguments: Sequence[str]) -> int:
    """Write the page. Returns pytest's exit code: 0 if no row failed, 1 if one did.

    ``arguments`` are options of ``plugin.py`` or of pytest, such as ``-k bits``.
    """
    files = [HERE / f"{group}.py" for group in BUDGETS]
    rows = [str(file) for file in files if file.exists()]
    return int(pytest.main([*rows, f"--confcutdir={HERE}", *_OPTIONS, *arguments]))
