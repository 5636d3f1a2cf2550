"""Which times a step's report has. Its text: ``test_report.py``."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core


def reports(devices, steps, **options):
    model = build(lambda: nn.Linear(4, 2))
    batch = randn(8, 4).double(), torch.arange(8) % 2, nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 2, devices, graphs=False) as engine:
        for _ in range(steps):
            engine.forward_backward(*batch, **options)
            yield engine.last_step


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["cpu:0", "cpu:1"]])
def test_step_tells_its_check_and_devices(devices):
    checked = []
    for report in reports(devices, 5):
        checked.append(report.check_seconds > 0.001)
        assert report.check_seconds < report.seconds["compute"]
        assert len(report.device_seconds) == len(report.launch_seconds) == 2
        assert report.device_seconds == report.launch_seconds  # a CPU has no queue
        assert report.graphs_are_off
        assert not report.is_compiled
    assert checked[0]


def test_two_passes_have_no_times():
    (report,) = reports(["cpu:0", "cpu:1"], 1, whole_batch=True)
    assert report.device_seconds == report.idle == ()
    assert report.hint == ""
