"""Optimizers of torch and other libraries, sharded: as the plain class, or refused."""

from __future__ import annotations

import collections

import pytest
from harness.public_optimizers import ALONE, EQUAL, REFUSED, libraries, outcome

pytestmark = pytest.mark.draws
# How many are equal, at least; what other versions add is not counted.
LEAST = {"torch.optim": 14, "timm": 80, "pytorch_optimizer": 100}


@pytest.mark.parametrize(
    "library",
    [
        "torch.optim",
        pytest.param("timm", marks=pytest.mark.slow),
        pytest.param("pytorch_optimizer", marks=pytest.mark.slow),
    ],
)
def test_five_steps_as_plain_or_refused(library):
    optimizers = libraries().get(library)
    if optimizers is None:
        pytest.skip(f"needs {library}")
    outcomes = {name: outcome(make) for name, make in optimizers.items()}
    faults = {
        name: found
        for name, found in outcomes.items()
        if found[0] not in (EQUAL, REFUSED, ALONE)
    }
    assert not faults
    counts = collections.Counter(what for what, _ in outcomes.values())
    assert counts[EQUAL] >= LEAST[library]
