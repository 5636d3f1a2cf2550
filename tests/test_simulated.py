"""What accelerators run, on a simulated one: see the package ``simulated``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults.processes import run

HERE = Path(__file__).parent


def test_the_tests_that_need_an_accelerator_pass_on_a_simulated_one(simulated_accelerator):
    if not simulated_accelerator:
        pytest.skip("there is no g++ to build it")
    tests = str(Path(__file__).with_name("test_accelerator.py"))
    arguments = ("-m", "pytest", "-p", "simulated", "-p", "no:cacheprovider", "-q", tests)
    outcome = run(*arguments, **simulated_accelerator)
    assert outcome.code == 0, outcome.out
    passed = re.search(r"(\d+) passed", outcome.out)
    assert passed is not None
    assert int(passed[1]) > 100, outcome.out
