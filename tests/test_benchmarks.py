"""The benchmarks still run, and their tables still go into their pages.

Speed is not asserted. With tiny sizes nothing is written: pages are copies.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("matplotlib")
pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["traffic", "memory"])
def test_benchmark_runs_with_tiny_sizes(folder):
    """Traffic's tables once had the name of a contender, for which pages have no place."""
    command = [sys.executable, "-m", "benchmarks", folder, "--quick"]
    environment = dict(os.environ)
    # pytest-benchmark measures nothing in a worker of xdist, nor in its children.
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
