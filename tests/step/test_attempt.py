"""The record of one try: its phases are timed, and profilers see its parts."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from functools import partial

import pytest
import torch
from harness.models import CLASSES, FEATURES, linear
from harness.oracle import randn
from torch import nn
from torch.profiler import ProfilerActivity, profile

from scatterpar import ScatterOnceParallel
from scatterpar.step import attempt as attempt_file
from scatterpar.step.attempt import WHOLE_STEP, Attempt, Extent, profiler_block
from scatterpar.torch_private.thread_modes import PROFILE_ALL_THREADS

pytestmark = pytest.mark.core


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


@contextlib.contextmanager
def noted(events, name):
    events.append(f"begin {name}")
    yield
    events.append(f"end {name}")


def test_profiled_phase_is_a_block(monkeypatch):
    (attempt,) = attempts_of(monkeypatch, is_profiled=True)
    events = []
    monkeypatch.setattr(torch.profiler, "record_function", partial(noted, events))
    with attempt.phase("reduce"):
        events.append("body")
    assert events == ["begin scatterpar reduce", "body", "end scatterpar reduce"]


def test_span_without_profiler_does_nothing(monkeypatch):
    (attempt,) = attempts_of(monkeypatch, is_profiled=False)
    assert attempt.span("reduce") is attempt.span("scatter")


def test_block_names_part_and_sub_step(monkeypatch):
    names = []
    monkeypatch.setattr(torch.profiler, "record_function", names.append)
    profiler_block("forward", 3)
    profiler_block("reduce")
    assert names == ["scatterpar forward 3", "scatterpar reduce"]


BATCH = randn(12, FEATURES), torch.arange(12) % CLASSES, nn.CrossEntropyLoss()


def profiled(engine, config=None, **options):
    """How often a profiler has seen each name in two steps with these options."""
    activities = [ProfilerActivity.CPU]
    with engine, profile(activities=activities, experimental_config=config) as profiler:
        for _ in range(2):
            engine.forward_backward(*BATCH, **options)
    return Counter({entry.key: entry.count for entry in profiler.key_averages()})


# What the page and the warning say.
ALL_THREADS = eval(PROFILE_ALL_THREADS.partition("=")[2])


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu:0", "cpu:1"],
        pytest.param(["cpu", "cpu"], marks=pytest.mark.slow),
        pytest.param(["cpu"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {}),
        ({}, {"whole_batch": True}),
        pytest.param({}, {"return_outputs": True}, marks=pytest.mark.slow),
        ({"graphs": True}, {}),
        pytest.param({"compile": {"backend": "eager"}}, {}, marks=pytest.mark.slow),
    ],
)
def test_profiler_sees_each_part_once(devices, how, options):
    """What is captured, warmed up or looked at is no sub-step of the step."""
    engine = ScatterOnceParallel(linear(), 3, devices, **how)
    found = profiled(engine, ALL_THREADS, **options)
    # The profiler has not switched graphs off: its blocks launch nothing.
    assert ("graphs" in how) == ("replayed" in engine.last_step.graphs)
    calls = 2 * len(devices)
    for sub_step in range(3):
        # The parts of a sub-step that is replayed are one block.
        replays = found[f"scatterpar replay {sub_step}"]
        assert found[f"scatterpar forward {sub_step}"] + replays == calls
        assert found[f"scatterpar backward {sub_step}"] + replays == calls
        # All but each replica's last sub-step run twice.
        again = calls if options.get("whole_batch") and sub_step < 2 else 0
        assert found[f"scatterpar recompute {sub_step}"] == again
        assert (
            "graphs" in how or found[f"scatterpar arrival {sub_step}"] == calls + again
        )
    for name in ("scatter", "replicate", "compute", "reduce", "commit"):
        assert found[f"scatterpar {name}"] == 2


def test_profiler_of_all_threads_sees_replicas():
    engine = ScatterOnceParallel(linear(), 3, ["cpu"] * 2, verify=False)
    found = profiled(engine, ALL_THREADS)
    # Sub-steps, replicas, steps.
    assert found["aten::addmm"] == found["AddmmBackward0"] == 3 * 2 * 2


@pytest.mark.filterwarnings("error")
def test_profiler_of_one_thread_warns():
    with pytest.warns(UserWarning, match=re.escape(PROFILE_ALL_THREADS)):
        found = profiled(ScatterOnceParallel(linear(), 3, ["cpu"] * 2))
    assert found["scatterpar compute"] == 2
    found = profiled(ScatterOnceParallel(linear(), 3, ["cpu"], verify=False))
    assert found["aten::addmm"] == 3 * 2


def test_extent_defaults_to_whole_step():
    assert Extent() == WHOLE_STEP
    assert WHOLE_STEP.max_substeps is None
    assert not WHOLE_STEP.is_trial
