"""A short soak: good steps and faults of all kinds; threads and tensors stay flat."""

from __future__ import annotations

import json

import pytest

from faults.forked import run_forked


@pytest.mark.parametrize(
    ("layout", "good", "faults"),
    [
        ("shared", 50, 30),
        pytest.param("shared", 200, 60, marks=pytest.mark.slow),
        pytest.param("virtual", 200, 60, marks=pytest.mark.slow),
    ],
)
def test_nothing_piles_up(layout, good, faults):
    outcome = run_forked("-m", "faults.soak", layout, str(good), str(faults))
    assert outcome.out.endswith("end\n"), outcome.err
    found = [json.loads(line) for line in outcome.out.splitlines()[:-1]]
    assert found[-1]["wrong"] == []
    assert len(found) == (good + faults) // 10
    for what in ("threads", "tensors"):
        counts = [each[what] for each in found]
        half = len(counts) // 2
        # An error that was just raised may still hold some; what piles up does not come down.
        assert min(counts[half:]) <= max(counts[:half]), f"{what}: {counts}"
