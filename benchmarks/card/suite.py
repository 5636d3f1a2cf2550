"""The tests of the repository that need a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu  # null GPUs have a stage of their own: tests/nullcuda/run
def test_repository_on_this_machine(setting, say):
    root, log = Path(__file__).parents[2], setting.folder / "suite.txt"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "cuda",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    with log.open("w") as file:
        code = subprocess.call(command, cwd=root, stdout=file, stderr=file)
    last = (log.read_text().strip().splitlines() or ["no output"])[-1].strip("= ")
    assert code == 0, f"{last}; see {log}"
    say(last)
