"""Who asks for another try of a call whose plan is fixed; those of ``accum="auto"`` are in
``options/test_auto_accum.py``.
"""

from __future__ import annotations

import pytest
import torch

from scatterpar.plan import make_plan
from scatterpar.step.substeps import Schedule
from scatterpar.step.tries import Tries, Try

pytestmark = pytest.mark.core

FIRST = Try(None, make_plan(3, [torch.device("cpu")]))


class Workers:
    """Counts how often memory is released."""

    released = 0

    def release(self):
        self.released += 1


class WithGraphs(Schedule):
    """Recovers once, as captured sub-steps do."""

    def __init__(self, seen):
        self.seen = seen

    def drop_graphs_after(self, error):
        self.seen.append(error)
        return len(self.seen) == 1


def test_schedule_asks_for_same_try_once():
    seen, workers = [], Workers()
    tries = Tries(FIRST, WithGraphs(seen), workers)
    errors = [RuntimeError("outdated"), RuntimeError("the user's")]
    assert [tries.go_on_after(error) for error in errors] == [True, False]
    assert seen == errors
    assert workers.released == 1
    assert tries.present is FIRST


@pytest.mark.parametrize("schedule", [None, Schedule()], ids=["map", "no graphs"])
def test_error_is_the_callers(schedule):
    workers = Workers()
    tries = Tries(FIRST, schedule, workers)
    assert not tries.go_on_after(RuntimeError("the user's"))
    assert not workers.released
