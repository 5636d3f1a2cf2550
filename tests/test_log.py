"""The logger ``scatterpar`` has looks and tries, and is silent in all other steps."""

from __future__ import annotations

import logging

import pytest
from faults.processes import run
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS = randn(8, 4)


def square(output, _):
    return output.square().mean()


@pytest.fixture
def texts(caplog):
    """The texts so far, of all levels."""
    caplog.set_level(logging.DEBUG, "scatterpar")
    return lambda: [record.getMessage() for record in caplog.records]


def test_only_looks_are_logged(texts):
    with ScatterOnceParallel(build(lambda: nn.Linear(4, 2)), 2, ["cpu"]) as engine:
        for _ in range(9):
            engine.forward_backward(ROWS, None, square)
    looks = [f"check {n} of the criterion square, 8 rows: right" for n in range(1, 5)]
    assert texts() == looks  # in steps 1, 2, 4 and 8


def test_refusal_is_logged(texts):
    def of_sums(output, _):
        return output.square().mean() * len(output)

    model = build(lambda: nn.Linear(4, 2))
    engine = ScatterOnceParallel(model, 2, ["cpu"])
    with engine, pytest.raises(ValueError, match="of_sums"):
        engine.forward_backward(ROWS, None, of_sums)
    assert texts() == [
        "check 1 of the criterion "
        "test_refusal_is_logged.<locals>.of_sums, 8 rows: refused"
    ]


def test_tries_of_auto_accum_are_logged(texts):
    class Small(nn.Linear):
        def forward(self, rows):
            if len(rows) > 2:
                raise MemoryError
            return super().forward(rows)

    model = build(lambda: Small(4, 2))
    engine = ScatterOnceParallel(model, "auto", ["cpu"], verify=False)
    with engine, pytest.warns(UserWarning, match="ran out of memory"):
        engine.forward_backward(ROWS, None, square)
    assert texts() == [
        *(f'accum="auto": 8 rows with accum={n} ran out of memory' for n in (1, 2)),
        'accum="auto": a trial with 4 fits',
        'accum="auto": 8 rows with accum=3 ran out of memory',
    ]


@pytest.mark.slow
def test_silent_until_program_sets_it_up():
    code = """
import logging, sys, torch
from scatterpar import ScatterOnceParallel
engine = ScatterOnceParallel(torch.nn.Linear(4, 2), 2, ["cpu:0", "cpu:1"])
rows = torch.ones(8, 4)
engine.forward_backward(rows, None, lambda output, _: output.mean())
print(logging.getLogger().handlers, file=sys.stderr)
logging.basicConfig(level=logging.INFO)
engine = ScatterOnceParallel(torch.nn.Linear(4, 2), 2, ["cpu:2", "cpu:3"])
engine.forward_backward(rows, None, lambda output, _: output.mean())
"""
    outcome = run("-c", code)
    assert outcome.code == 0, outcome.err
    first, *lines = outcome.err.splitlines()
    assert first == "[]"
    assert lines == [
        f"INFO:scatterpar:a copy of 16384 bytes from {source} to {target} arrived intact"
        for source, target in (("cpu:2", "cpu:3"), ("cpu:3", "cpu:2"))
    ]
