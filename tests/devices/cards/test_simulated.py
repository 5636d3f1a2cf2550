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
        "test_calls.py",
        "test_draws.py",
        "test_harsh_accelerator.py",
        "../../options/graphs/test_graphs.py",
        "../../exact/test_captured.py",
    )
]


def passed_on(accelerator, order, *arguments):
    """The number of tests that pass on the simulated accelerator: all of them."""
    if not accelerator:
        pytest.skip("there is no g++ to build it")
    variables = {control.ORDER: order, "OMP_NUM_THREADS": "1"}  # its tensors are small
    plugins = ("-p", "simulated", "-p", "no:cacheprovider")
    outcome = run(
        "-m", "pytest", *plugins, "-q", *arguments, **accelerator, **variables
    )
    assert outcome.code == 0, outcome.out
    passed = re.search(r"(\d+) passed", outcome.out)
    assert passed is not None
    assert "skipped" not in outcome.out
    return int(passed[1])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["late", "random:1"])
def test_accelerator_tests_pass_simulated(simulated_accelerator, order):
    assert passed_on(simulated_accelerator, order, *TESTS) > 200
