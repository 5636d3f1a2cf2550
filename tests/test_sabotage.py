"""Every promise is tested: a test fails if the engine is broken there (tests/sabotage.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sabotage import ROOT, SABOTAGES, code_of, name_of_test, sabotaged

BY_CONTRACT = 40  # at least so many are seen by `pytest -m contract`


def test_every_sabotage_applies_and_names_its_test():
    """A place that has moved is named; ``python -m tests.sabotage WORDS`` tries what was mended."""
    for sabotage in SABOTAGES:
        function, code = code_of(sabotage, *sabotaged(sabotage))
        assert code.co_freevars == function.__code__.co_freevars, sabotage.line
        assert name_of_test(sabotage), f"{sabotage.line}: no test is named {sabotage.seen_by}"
    assert len({sabotage.what for sabotage in SABOTAGES}) == len(SABOTAGES)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork on this system")
def test_every_sabotage_is_seen():
    """The table ends by itself, see ``TOTAL_SECONDS``."""
    command = [sys.executable, "-m", "tests.sabotage"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.endswith("by the contract")]
    assert int(line.split()[0]) >= BY_CONTRACT
