"""Who asks for another try of a call whose plan is fixed; those of ``accum="auto"`` are in
``options/test_auto_accum.py``.
"""

from __future__ import annotations

import weakref

import pytest
import torch

from scatterpar.plan import make_plan
from scatterpar.step.attempt import Extent
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


class OneTrial(Tries):
    """A trial, then the whole call; checks that the trial's result is gone by then."""

    def go_on_after(self, error):
        assert error is None
        assert self.trial() is None
        self.present = FIRST
        return True


def compute(tries, results):
    """Computes ``results``, of which exceptions are raised, until one is the call's."""
    while tries.result is None:
        with tries:
            result = results.pop(0)
            if isinstance(result, BaseException):
                raise result
            tries.result = result
    return tries.result


def test_error_ends_where_a_try_follows():
    tries = Tries(FIRST, WithGraphs([]), Workers())
    assert compute(tries, [RuntimeError("outdated"), "done"]) == "done"


@pytest.mark.parametrize("error", [RuntimeError("the user's"), KeyboardInterrupt()])
def test_other_errors_leave_the_body(error):
    seen = [None]  # recovers only at first
    tries = Tries(FIRST, WithGraphs(seen), Workers())
    with pytest.raises(type(error)) as caught:
        compute(tries, [error])
    assert caught.value is error
    assert seen[1:] == ([error] if isinstance(error, Exception) else [])
    assert tries.result is None


def test_trial_is_freed_before_the_next_try():
    trial = torch.zeros(3)
    tries = OneTrial(FIRST._replace(extent=Extent(is_trial=True)), None, Workers())
    tries.trial = weakref.ref(trial)
    results = [trial, "done"]
    del trial
    with tries:
        tries.result = results.pop(0)
    assert tries.present is FIRST
    assert compute(tries, results) == "done"
