"""The record of one try: its parts are timed, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness.models import FEATURES, linear
from harness.oracle import randn

from scatterpar import ScatterOnceParallel, torch_private
from scatterpar.step import attempt as attempt_file
from scatterpar.step.attempt import WHOLE_STEP, Attempt, Extent, profiler_block

pytestmark = pytest.mark.core


class Clock:
    """Notes which parts begin and end."""

    def __init__(self):
        self.events = []

    @contextlib.contextmanager
    def __call__(self, name, share, sub_step):
        self.events.append(("begin", name, share, sub_step))
        yield
        self.events.append(("end", name, share, sub_step))


def squares(output, _):
    return output.square().mean()


def attempts_of(monkeypatch, **changes):
    """The attempts of one step, which ``changes`` alter as they are made."""
    made = []

    class Recorded(Attempt):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for name, value in changes.items():
                setattr(self, name, value)
            made.append(self)

    monkeypatch.setattr("scatterpar.engine.Attempt", Recorded)
    with ScatterOnceParallel(linear(), 1, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(randn(5, FEATURES), None, squares)
    return made


def test_step_is_one_attempt_weights_sum_to_1(monkeypatch):
    (attempt,) = attempts_of(monkeypatch)
    assert attempt.extent is WHOLE_STEP
    assert [share.rows for share in attempt.plan.shares] == [3, 2]
    assert [list(weights) for weights in attempt.weights.by_share] == [[0.6], [0.4]]


def test_seconds_counted_if_phase_fails(monkeypatch):
    (attempt,) = attempts_of(monkeypatch)
    now = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(attempt_file.time, "perf_counter", lambda: next(now))
    attempt.seconds = dict.fromkeys(attempt.seconds, 0.0)
    with attempt.phase("scatter"):
        pass
    with pytest.raises(KeyError), attempt.phase("scatter"):
        raise KeyError
    expected = {"scatter": 3.5, "replicate": 0.0, "compute": 0.0, "reduce": 0.0}
    assert attempt.seconds == expected


def test_clock_times_phases_of_caller(monkeypatch):
    clock = Clock()
    (attempt,) = attempts_of(monkeypatch, clock=clock)
    clock.events.clear()
    with attempt.phase("reduce"):
        clock.events.append("body")
    part = ("reduce", None, None)
    assert clock.events == [("begin", *part), "body", ("end", *part)]


def test_span_without_clock_does_nothing(monkeypatch):
    (attempt,) = attempts_of(monkeypatch, clock=None)
    assert attempt.span("reduce") is attempt.span("scatter")


def test_profiler_sees_sub_steps(monkeypatch):
    names = []
    monkeypatch.setattr(torch.profiler, "record_function", names.append)
    profiler_block("forward", None, 3)
    profiler_block("reduce")
    assert names == ["scatterpar forward 3", "scatterpar reduce"]


@pytest.mark.parametrize(("is_on", "clock"), [(True, profiler_block), (False, None)])
def test_profiler_is_the_clock(monkeypatch, is_on, clock):
    monkeypatch.setattr(torch_private, "profiler_is_on", lambda: is_on)
    (attempt,) = attempts_of(monkeypatch)
    assert attempt.clock is clock


def test_extent_defaults_to_whole_step():
    assert Extent() == WHOLE_STEP
    assert WHOLE_STEP.max_substeps is None
    assert not WHOLE_STEP.is_trial
