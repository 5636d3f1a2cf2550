"""Loops of other libraries on the simulated accelerator: a few of the tests that
``tests/README.md`` runs there.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from faults.processes import run

TESTS = Path(__file__).parents[1]
# Of each library: its marker, its file, which tests, and how many these are.
CHOSEN = {
    "transformers": (
        "trainers",
        "integrations/test_transformers.py",
        "virtual and (run_equals and (classes or images or own) or prediction "
        "or functions_write)",
        7,
    ),
    "lightning": (
        "loops",
        "integrations/test_lightning.py",
        "(functions_write and layout0) or (evaluation_equals and apart)",
        5,
    ),
    "fastai": (
        "loops",
        "integrations/test_fastai.py",
        "(run_equals and plain) or predictions_as_stock",
        3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=getattr(pytest.mark, chosen[0]))
        for name, chosen in CHOSEN.items()
    ],
)
def test_loop_on_two_real_memories(library, simulated_accelerator):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if not simulated_accelerator:
        pytest.skip("there is no g++ to build it")
    _, file, names, number = CHOSEN[library]
    plugins = ["-p", "simulated", "-p", "harness.loops_on_simulated"]
    quiet = ["-p", "no:cacheprovider", "-q", "-m", "slow or not slow"]
    outcome = run(
        "-m",
        "pytest",
        *plugins,
        *quiet,
        "-k",
        names,
        str(TESTS / file),
        OMP_NUM_THREADS="1",
        **simulated_accelerator,
    )
    assert outcome.code == 0, outcome.out
    assert f"{number} passed" in outcome.out
