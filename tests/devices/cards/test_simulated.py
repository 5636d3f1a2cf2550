"""What accelerators run, on a simulated one: see the package ``simulated``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults.processes import run
from simulated import control

TESTS = [
    str(Path(__file__).parent / name)
    for name in (
        "test_accelerator.py",
        "test_harsh_accelerator.py",
        "../../options/test_cuda_graphs.py",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["late", "random:1"])
def test_accelerator_tests_pass_simulated(simulated_accelerator, order):
    if not simulated_accelerator:
        pytest.skip("there is no g++ to build it")
    variables = {control.ORDER: order, "OMP_NUM_THREADS": "1"}  # its tensors are small
    arguments = (
        "-m",
        "pytest",
        "-p",
        "simulated",
        "-p",
        "no:cacheprovider",
        "-q",
        *TESTS,
    )
    outcome = run(*arguments, **simulated_accelerator, **variables)
    assert outcome.code == 0, outcome.out
    passed = re.search(r"(\d+) passed", outcome.out)
    assert passed is not None
    assert int(passed[1]) > 200, outcome.out
    assert "skipped" not in outcome.out
