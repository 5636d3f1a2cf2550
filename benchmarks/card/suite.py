"""The tests of the repository that need a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu  # null GPUs have a stage of their own: tests/nullcuda/run
def test_repository_on_this_machine(setting, say):
    log = setting.folder / "suite.txt"
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider"]
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=Path(__file__).parents[2], stdout=file, stderr=file
        ).returncode
    last = (log.read_text().strip().splitlines() or ["no output"])[-1].strip("= ")
    assert code == 0, f"{last}; see {log}"
    say(last)
