"""How far a nudge changes a result, and what it explains."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from harness.small_looks import asked

from scatterpar.numerics.nudges import nudged, rounding_limit

pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_nudge_is_rounding_that_grows(monkeypatch):
    def question(runs):
        task = runs.replica_task
        nudges = [partial(runs.nudge, number) for number in (0, 15)]
        results = [runs.run([[5]], task, prepare=nudge).result for nudge in nudges]
        return [abs(result.loss - 13) for result in results]

    first, last = asked(monkeypatch, question)
    assert 0 <= first < last < 1e-12


def test_each_number_nudges_in_another_way():
    ones = torch.ones(4, dtype=torch.float64)
    first, second = (nudged(ones, number, eps=1e-3) for number in (3, 4))
    assert (first - ones).abs().max() < 1e-2
    assert not torch.equal(first, second)
    assert torch.equal(first, nudged(ones, 3, eps=1e-3))


LIMITS = {
    "nothing yet": ([], 0.1, 0.0),
    "the first counts four times": ([0.01], 0.1, 0.04),
    "later ones twice": ([0.01, 0.03], 0.1, 0.06),
    "later ones explain no large difference": ([0.01, 0.3], 0.5, 0.04),
    "an overflow is no rounding": ([math.inf, math.nan, 0.01], 0.1, 0.02),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_by_effects(name):
    effects, difference, expected = LIMITS[name]
    assert rounding_limit(effects, difference) == pytest.approx(expected)
