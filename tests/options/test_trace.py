"""engine.trace(): what is recorded, printed and saved; the blocks that
profilers see.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
import torch
from harness.notes import beginning_of_note
from harness.pages import blocks, namespace, read, run
from torch import nn
from torch.profiler import ProfilerActivity, profile

from scatterpar import ScatterOnceParallel
from scatterpar.torch_private import PROFILE_ALL_THREADS

pytestmark = pytest.mark.draws
CE = nn.CrossEntropyLoss()
LAYOUTS = [["cpu"] * 2, ["cpu:0", "cpu:1"], ["cpu"]]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(rows=12):
    return torch.randn(rows, 4), torch.arange(rows) % 2


def engine_of(devices=LAYOUTS[0], accum=3, **options):
    return ScatterOnceParallel(network(), accum, devices, **options)


def traced(engine, steps=1, **options):
    with engine, engine.trace() as trace:
        for _ in range(steps):
            engine.forward_backward(*batch(), CE, **options)
    return trace


def counted(trace, tmp_path):
    """How many complete events of each name each thread has, by the threads' names."""
    trace.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))[
        "traceEvents"
    ]
    threads = {
        e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    complete = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    return Counter((threads[e["tid"]], e["name"]) for e in complete)


@pytest.mark.parametrize(
    "devices",
    [LAYOUTS[1], *(pytest.param(LAYOUTS[n], marks=pytest.mark.slow) for n in (0, 2))],
)
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {}),
        ({}, {"whole_batch": True}),
        ({}, {"return_outputs": True}),
        ({"graphs": True}, {}),
        ({"compile": {"backend": "eager"}}, {}),
    ],
)
def test_sub_step_has_forward_and_backward(devices, how, options, tmp_path):
    """What is captured, warmed up or checked is no sub-step of the step."""
    found = counted(traced(engine_of(devices, **how), steps=2, **options), tmp_path)
    for replica, device in enumerate(devices):
        thread = f"replica {replica}, {device}"
        assert (found[thread, "forward"], found[thread, "backward"]) == (6, 6)
        # all but each replica's last one
        again = 4 if options.get("whole_batch") else 0
        assert found[thread, "recompute"] == again
        assert "graphs" in how or found[thread, "arrival"] == 6 + again
    assert [found["caller", n] for n in ("step", "replicate", "reduce", "commit")] == [
        2
    ] * 4


def test_events_ordered_within_their_step():
    trace = traced(engine_of(), steps=3)
    assert [step.number for step in trace.steps] == [0, 1, 2]
    for step in trace.steps:
        assert step.error is None
        for event in step.events:
            assert step.start <= event.start <= event.end <= step.end
        for replica in (0, 1):
            own = [event for event in step.events if event.replica == replica]
            assert [(e.name, e.sub_step) for e in own] == [
                (name, n)
                for n in range(3)
                for name in ("arrival", "forward", "backward")
            ]
            assert all(e.end <= later.start for e, later in itertools.pairwise(own))


def test_failed_step_is_recorded(tmp_path):
    """In a sub-step, and before it has a plan."""

    def fails(output, targets):
        raise ValueError("no such loss")

    inputs, targets = batch()
    with engine_of(verify=False) as engine:
        with engine.trace() as trace:
            with pytest.raises(ValueError, match="no such loss"):
                engine.forward_backward(inputs, targets, fails)
            with pytest.raises(ValueError, match=" rows"):
                engine.forward_backward(inputs, targets[:5], CE)
        engine.forward_backward(inputs, targets, CE)
    first, second = trace.steps
    assert first.error == "ValueError: no such loss"
    assert counted(trace, tmp_path)["replica 0, cpu", "forward"] == 1
    assert f"step 0 failed: {first.error}\nstep 1 failed: {second.error}" in str(trace)


def test_trace_changes_no_bits_ends_with_block():
    data = *batch(), CE
    with engine_of() as engine:
        with engine.trace() as trace:
            engine.forward_backward(*data)
        found = [p.grad.clone() for p in engine.module.parameters()]
        engine.zero_grad()
        engine.forward_backward(*data)
        assert all(
            map(torch.equal, found, (p.grad for p in engine.module.parameters()))
        )
        with engine.trace() as other:
            with pytest.raises(RuntimeError, match="traced already"), engine.trace():
                pass
            engine.check(*data)
            engine.eval()(data[0])
    assert (len(trace.steps), len(other.steps)) == (1, 0)
    assert str(other) == "No step was recorded."


def test_table_has_a_line_per_replica():
    shown = str(traced(engine_of(LAYOUTS[1]), steps=2))
    title, head, *lines, once, longest = shown.splitlines()
    assert re.fullmatch(
        r"2 steps of [\d.]+ ms, [\d.]+ ms between steps; in ms per step:", title
    )
    assert head.split() == [
        "replica",
        "device",
        "arrival",
        "forward",
        "backward",
        "waited",
    ]
    assert [line.split()[:2] for line in lines] == [["0", "cpu:0"], ["1", "cpu:1"]]
    parts = "scatter", "replicate", "reduce", "commit", "checks and compiling"
    pattern = "for all: " + "".join(rf"{part} [\d.]+, " for part in parts)
    assert re.fullmatch(pattern + r"computing [\d.]+", once)
    assert re.match(
        r"The longest sub-step, \d of replica [01] in step [01], took [\d.]+ ms; the",
        longest,
    )


def test_waiting_for_criterion_not_computing():
    def slow(output, targets):
        time.sleep(0.05)
        return output.sum()

    with engine_of(LAYOUTS[1], 1, verify=False) as engine, engine.trace() as trace:
        engine.forward_backward(*batch(), slow, reduction="sum")
    turns = [event for event in trace.steps[0].events if event.name == "criterion"]
    assert len(turns) == 2
    assert turns[0].end <= turns[1].start


def test_early_replica_waits_pause_is_callers():
    class SlowOnTheSecond(nn.Module):
        def forward(self, output, targets):
            time.sleep(0.2 * bool(targets[0]))
            return output.sum()

    data = torch.randn(4, 4), torch.tensor([0, 0, 1, 1]), SlowOnTheSecond()
    with engine_of(LAYOUTS[1], 1, verify=False) as engine:
        engine.forward_backward(*data, reduction="sum")
        with engine.trace() as trace:
            time.sleep(0.3)
            engine.forward_backward(*data, reduction="sum")
    waited = [float(line.split()[-1]) for line in str(trace).splitlines()[2:4]]
    assert waited[0] > waited[1]
    assert float(re.search(r"([\d.]+) ms between steps", str(trace))[1]) >= 300
    assert "criterion" in str(trace)
    assert engine.last_step.waited >= 0.3


def test_last_step_is_a_notebook_table():
    with engine_of(LAYOUTS[1]) as engine:
        for step in range(2):
            engine.forward_backward(*batch(), CE)
            assert (engine.last_step.waited > 0) == (step > 0)
    report = engine.last_step
    assert len(report.replica_seconds) == 2
    assert min(report.replica_seconds) > 0
    shown = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    cells = [cell.text for cell in shown.iter("td")]
    assert {"scatter", "replicate", "compute", "reduce", "cpu:0", "cpu:1"} <= set(cells)


def profiled(engine, **options):
    with engine, profile(activities=[ProfilerActivity.CPU], **options) as found:
        engine.forward_backward(*batch(), CE)
    return Counter({entry.key: entry.count for entry in found.key_averages()})


def test_profiler_of_all_threads_sees_replicas():
    # what the page and the warning say
    config = eval(PROFILE_ALL_THREADS.partition("=")[2])
    engine = engine_of(verify=False)
    engine.forward_backward(*batch(), CE)
    found = profiled(engine, experimental_config=config)
    assert found["aten::addmm"] == 2 * 3 * 2  # layers, sub-steps, replicas
    assert found["AddmmBackward0"] == 2 * 3 * 2
    for number in range(3):
        assert (
            found[f"scatterpar forward {number}"]
            == found[f"scatterpar backward {number}"]
            == 2
        )
    assert found["scatterpar replicate"] == found["scatterpar reduce"] == 1


@pytest.mark.filterwarnings("error")
def test_profiler_of_one_thread_warns():
    with pytest.warns(UserWarning, match=re.escape(PROFILE_ALL_THREADS)):
        found = profiled(engine_of())
    assert found["scatterpar compute"] == 1
    found = profiled(engine_of(LAYOUTS[2], verify=False))
    assert found["aten::addmm"] == 2 * 3


def test_page_runs_and_quotes_messages():
    page = read("docs/debug.md").partition("\n## Why is my step slow?")[2]
    names = namespace() | {
        "ScatterOnceParallel": ScatterOnceParallel,
        "device_ids": ["cpu"] * 2,
    }
    for code in blocks(page, "python"):
        run(code, names)
    assert PROFILE_ALL_THREADS.partition("=")[2] in page


@pytest.mark.parametrize(
    ("accum", "rows", "remedy"),
    [
        (4, 7, "use a smaller accum=, or micro_batch_size="),
        (1, 2, "use a larger batch, drop_last=True of the loader"),
    ],
)
def test_batch_norm_of_one_row_has_remedy(accum, rows, remedy):
    """torch's own error stays; a note has the way out."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with ScatterOnceParallel(model, accum, ["cpu"] * 2) as engine:
        with pytest.raises(
            ValueError, match="Expected more than 1 value per channel"
        ) as caught:
            engine.forward_backward(*batch(rows), CE)
        where, *others = caught.value.__notes__
        assert f"a micro-batch of one row: {remedy}" in "\n".join(others)
        assert where.startswith(tuple(beginning_of_note(i, "cpu") for i in (0, 1)))
