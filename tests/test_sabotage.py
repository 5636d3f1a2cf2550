"""Every promise is tested: a test fails if the engine is broken there
(tests/sabotage.py).
"""

import subprocess
import sys

import pytest
from sabotage import ROOT, SABOTAGES, name_of_test, sabotaged


def test_sabotages_apply_and_name_a_test():
    """A place that has moved is named; ``python -m tests.sabotage WORDS`` tries what
    was mended.
    """
    for sabotage in SABOTAGES:
        path, source = sabotaged(sabotage)
        compile(source, path, "exec", dont_inherit=True)
        assert name_of_test(sabotage), (
            f"{sabotage.line}: no test is named {sabotage.seen_by}"
        )
    assert len({sabotage.name for sabotage in SABOTAGES}) == len(SABOTAGES)


@pytest.mark.slow
def test_every_sabotage_is_seen():
    command = [sys.executable, "-m", "tests.sabotage"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
