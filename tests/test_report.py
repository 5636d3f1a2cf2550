"""A step's report as text and as tables; what it counts: ``devices/test_transfers.py``."""

from __future__ import annotations

import copy
import pickle
import time
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.plan import make_plan
from scatterpar.report import GraphReport, StepReport

pytestmark = pytest.mark.core
DEVICES = torch.device("cpu:0"), torch.device("cpu:1")


@pytest.fixture
def report():
    """Five rows on two replicas: 3 and 2."""
    return StepReport(
        make_plan(5, DEVICES),
        loss=0.25,
        seconds={"scatter": 0.0015, "reduce": 1.5},
        bytes={"scatter": 1234567, "reduce": 0},
        messages={"scatter": 2, "reduce": 0},
        waited=0.125,
        replica_seconds=(0.5, 0.25),
    )


def test_report_as_text(report):
    title, speed, *table = str(report).splitlines()
    assert title == "loss 0.25, 5 rows on 2 replicas"
    assert speed == "3 rows per second"
    assert [line.split() for line in table] == [
        [],
        ["phase", "ms", "bytes", "copies"],
        ["scatter", "1.5", "1,234,567", "2"],
        ["reduce", "1,500.0", "0", "0"],
        [],
        ["replica", "device", "rows", "ms"],
        ["0", "cpu:0", "3", "500.0"],
        ["1", "cpu:1", "2", "250.0"],
    ]


def test_report_shows_what_devices_do(report):
    """Of 2 s the first device has a share for 1.5 s, and the second for 0.5 s."""
    timed = replace(
        report,
        seconds={"scatter": 0.5, "reduce": 1.5},
        device_seconds=(1.5, 0.5),
        graphs=GraphReport(0, 16, "a reason"),
        check_seconds=0.25,
        launch_seconds=(1.5, 0.5),
    )
    assert timed.idle == (0.25, 0.75)
    lines = str(timed).splitlines()
    assert lines[1] == (
        "2 rows per second; no replica computes in 25% of the step; the check before "
        "it took 250.0 ms"
    )
    assert lines[-1] == "graphs: eager: a reason"
    table = [line.split() for line in lines[-5:-2]]
    assert table == [
        ["replica", "device", "rows", "ms", "busy", "idle", "most", "memory"],
        ["0", "cpu:0", "3", "500.0", "75%", "25%", "unknown"],
        ["1", "cpu:1", "2", "250.0", "25%", "75%", "unknown"],
    ]
    page = timed._repr_html_()
    assert "<td>25%</td>" in page


def test_report_as_tables(report):
    page = report._repr_html_()
    assert "<p>loss 0.25, 5 rows on 2 replicas; waited 125.0 ms" in page
    assert "<td>scatter</td><td>1.5</td><td>1,234,567</td><td>2</td>" in page
    assert "<td>1</td><td>cpu:1</td><td>2</td><td>250.0</td>" in page


def test_hint_is_of_a_step_without_a_check(report):
    """A check counts for the step's time, and not for its serial part."""
    timed = replace(
        report,
        seconds={"scatter": 0.5, "reduce": 1.5},
        device_seconds=(1.5, 1.5),
        launch_seconds=(1.5, 1.5),
    )
    hint = "no replica computes in 25% of the step: take more rows per step, "
    assert str(timed).splitlines()[-1].startswith(f"hint: {hint}")
    assert f"<p>hint: {hint}" in timed._repr_html_()
    assert replace(timed, check_seconds=0.4).hint == ""
    # The CPU never waits for the host.
    assert replace(timed, seconds={"reduce": 1.6}).hint == ""


def test_repr_is_one_line_speed_without_wait():
    plan = make_plan(8, [torch.device("cpu")] * 2, 1)
    seconds = {"scatter": 0.5, "replicate": 0.0, "compute": 1.0, "reduce": 0.5}
    report = StepReport(plan, 1.5, seconds, {}, {}, waited=9.0)
    assert report.rows_per_second == 4.0
    assert repr(report) == "<StepReport: loss 1.5, 8 rows on 2 replicas>"


def test_step_fills_the_report():
    """In both memories; and the caller's pause before a step is not the engine's."""
    model = build(lambda: nn.Linear(4, 2))
    batch = randn(5, 4).double(), torch.arange(5) % 2, nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, device_ids=DEVICES) as engine:
        engine.forward_backward(*batch)
        assert engine.last_step.waited == 0
        time.sleep(0.1)
        engine.forward_backward(*batch)
        report = engine.last_step
    assert report.waited >= 0.1
    assert len(report.replica_seconds) == 2
    assert min(report.replica_seconds) > 0
    assert len(report.device_seconds) == 2
    assert 0 < min(report.device_seconds) < sum(report.seconds.values())
    assert all(0 <= idle < 1 for idle in report.idle)
    page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    cells = {cell.text for cell in page.iter("td")}
    assert {"scatter", "replicate", "compute", "reduce", "cpu:0", "cpu:1"} <= cells


def test_graphs_are_a_record_that_prints_as_a_sentence():
    replayed = GraphReport(15, 16)
    eager = GraphReport(0, 16, "no gradient is computed")
    assert str(replayed) == "15 of 16 sub-steps replayed"
    assert (replayed.replayed, replayed.total, replayed.why) == (15, 16, "")
    assert str(eager) == "eager: no gradient is computed"
    assert (eager.replayed, eager.total) == (0, 16)
    for copied in (copy.deepcopy(eager), pickle.loads(pickle.dumps(eager))):
        assert copied == eager
        assert copied.why == eager.why
