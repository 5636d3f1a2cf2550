"""What accelerators run, on a simulated one: see the package ``simulated``."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import simulated

from faults.processes import environment, run

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_tests_that_need_an_accelerator_pass_on_a_simulated_one(tmp_path, monkeypatch):
    monkeypatch.setenv(simulated.LIBRARY, str(simulated.build(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    tests = str(HERE / "test_accelerator.py")
    outcome = run("-m", "pytest", "-p", "simulated", "-p", "no:cacheprovider", "-q", tests)
    assert outcome.code == 0, outcome.out
    passed = re.search(r"(\d+) passed", outcome.out)
    assert passed and int(passed[1]) > 40, outcome.out
