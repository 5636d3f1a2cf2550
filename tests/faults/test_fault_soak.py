"""A short soak: good steps, faults of all kinds and interrupts; threads and tensors stay flat."""

from __future__ import annotations

import json

import pytest

from faults.processes import run

SCRIPT = """
import dataclasses, json, sys
from faults.soak import soak
heard = lambda record: print(record.steps[-1], file=sys.stderr)
record = soak(200, 60, 8, {layout!r}, every=20, report=heard)
print(json.dumps(dataclasses.asdict(record)))
"""


@pytest.mark.parametrize("layout", ["shared", pytest.param("virtual", marks=pytest.mark.slow)])
def test_nothing_piles_up(layout):
    outcome = run("-c", SCRIPT.format(layout=layout))
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["wrong"] == []
    assert (record["good"], sum(record["faults"].values()), record["interrupts"]) == (200, 60, 8)
    assert record["strikes"] >= 8
    half = len(record["steps"]) // 2
    for what in ("threads", "tensors"):
        early, late = record[what][:half], record[what][half:]
        # An error that was just raised may still hold some; what piles up does not come down.
        assert min(late) <= max(early), f"{what}: {record[what]}"
