"""A short soak: good steps, faults of all kinds and interrupts; threads and tensors stay flat."""

from __future__ import annotations

import json

import pytest

from faults.forked import run_forked

SCRIPT = """
import dataclasses, json, sys
from faults.soak import soak
heard = lambda record: print(record.steps[-1], file=sys.stderr)
record = soak({good}, {faults}, {interrupts}, {layout!r}, every={every}, report=heard)
print(json.dumps(dataclasses.asdict(record)))
"""


LENGTHS = {
    "short": {"good": 80, "faults": 36, "interrupts": 4, "every": 10},
    "long": {"good": 200, "faults": 60, "interrupts": 8, "every": 20},
}


@pytest.mark.parametrize(
    ("layout", "length"),
    [
        ("shared", "short"),
        pytest.param("shared", "long", marks=pytest.mark.slow),
        pytest.param("virtual", "long", marks=pytest.mark.slow),
    ],
)
def test_nothing_piles_up(layout, length):
    wanted = LENGTHS[length]
    outcome = run_forked("-c", SCRIPT.format(layout=layout, **wanted))
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert record["wrong"] == []
    assert record["good"] == wanted["good"]
    assert sum(record["faults"].values()) == wanted["faults"]
    assert record["strikes"] >= record["interrupts"] == wanted["interrupts"]
    half = len(record["steps"]) // 2
    for what in ("threads", "tensors"):
        early, late = record[what][:half], record[what][half:]
        # An error that was just raised may still hold some; what piles up does not come down.
        assert min(late) <= max(early), f"{what}: {record[what]}"
