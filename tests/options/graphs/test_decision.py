"""When an engine captures: times of eager steps, and of steps with graphs."""

from __future__ import annotations

import pytest

from scatterpar.options.graphs.decision import Decision, GraphStage, StepTimes


class Clock:
    """A share that was launched and computed in these seconds."""

    def __init__(self, launching, working):
        self.launching = launching
        self._working = working

    def working(self):
        return self._working


def step(launching, *working, substeps=4, rows=100):
    return StepTimes([Clock(launching, w) for w in working], rows, substeps)


# A GPU computes a sub-step in 1 s, after the host has launched it in 2 s, or in 0.5 s.
# It has up to one sub-step left when the host has launched all.
@pytest.mark.parametrize("substeps", [2, 4, 16])
def test_device_that_waits_is_known_by_its_tail(substeps):
    launching = 2.0 * substeps
    waiting = step(launching, launching + 0.5, substeps=substeps)
    assert waiting.devices_waited()
    # A device that never waits computes for longer than the host launches.
    busy = step(0.5 * substeps, 0.5 + substeps, substeps=substeps)
    assert not busy.devices_waited()


def test_wait_is_told_with_its_limit():
    """In a quarter of a share; of four sub-steps a tail of 0.75 may be left."""
    assert step(9.0, 9.0, 12.0).wait() == (
        "the host waited for devices in 25% of a share; below 19% in 3 steps in a row, "
        "sub-steps are captured"
    )
    assert step(9.0, None).wait() == ""


def test_each_device_has_to_wait():
    assert step(8.0, 8.5, 8.5).devices_waited()
    assert not step(8.0, 8.5, 20.0).devices_waited()
    assert not step(8.0, 8.5, None).devices_waited()  # nobody knows yet
    assert not step(8.0).devices_waited()


def waited(*, seconds=8.5):
    decision = Decision(is_asked=False)
    for _ in range(3):
        assert not decision.devices_wait()
        decision.see_eager(step(8.0, seconds))
    return decision


def test_three_steps_in_a_row():
    decision = waited()
    assert decision.devices_wait()
    decision.see_eager(step(2.0, 8.0))
    assert not decision.devices_wait()


def test_faster_steps_are_kept():
    decision = waited()
    decision.begin()
    assert decision.stage is GraphStage.CAPTURING
    for _ in range(3):
        decision.see_captured(step(0.1, 5.0))
    assert decision.stage is GraphStage.REPLAYING
    for _ in range(3):  # what is decided stays
        decision.see_captured(step(0.1, 50.0))
    assert decision.stage is GraphStage.REPLAYING


def test_slower_steps_are_not_kept():
    decision = waited()
    decision.begin()
    for _ in range(3):
        decision.see_captured(step(0.1, 9.0))
    assert decision.stage is GraphStage.REFUSED
    assert decision.refusal == (
        "graphs do not make it faster: 9e+04 µs per row with them, 8.5e+04 without"
    )


def test_times_are_compared_per_row():
    decision = waited()
    decision.begin()
    for _ in range(3):
        decision.see_captured(step(0.1, 16.0, rows=200))
    assert decision.stage is GraphStage.REPLAYING


def test_what_is_asked_for_is_not_compared():
    decision = Decision(is_asked=True)
    assert decision.stage is GraphStage.CAPTURING
    for _ in range(3):
        decision.see_captured(step(0.1, 9.0))
    assert decision.stage is GraphStage.REPLAYING


@pytest.mark.parametrize("value", [None, float("nan")])
def test_no_evidence_is_no_gain(value):
    """A device that is not done has no time; NaN is at no place above."""
    decision = waited()
    decision.begin()
    for _ in range(3):
        decision.see_captured(step(0.1, value))
    assert decision.stage is not GraphStage.REPLAYING
