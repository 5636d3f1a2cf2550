"""A device without streams and events, whose kernels run late: shaders, on the CPU.

``test_accelerator.py`` has the rest; these are what only such a device meets.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import scatterpar
from scatterpar import DataParallelModel, ScatterOnceParallel
from scatterpar.checkup import copies, small_step
from scatterpar.devices.streams import has_streams

pytestmark = [pytest.mark.vulkan, pytest.mark.draws]
TWO = [0, 1]


def test_two_devices_without_streams():
    assert torch.accelerator.device_count() == 2
    assert not has_streams(torch.device("vulkan", 0))


def test_calls_and_graphs_refused():
    model = nn.Linear(8, 3).to("vulkan")
    with pytest.raises(
        ValueError, match="vulkan:0 has no events, which autograd needs"
    ):
        DataParallelModel(model, TWO)
    engine = ScatterOnceParallel(model, device_ids=TWO)
    # It was torch's "Backend doesn't support events".
    with engine, pytest.raises(ValueError, match="vulkan:0 has no events"):
        engine(torch.ones(4, 8))
    with pytest.raises(ValueError, match="captures no graphs"):
        ScatterOnceParallel(model, 1, TWO, graphs=True)


def test_doctor_ends_and_finds_nothing_wrong(monkeypatch):
    """It timed as many rows as on GPUs, and copied 256 MiB: ten minutes were not
    enough.
    """
    monkeypatch.setattr(copies, "SIZES", (1000, 2**16))
    monkeypatch.setattr(small_step, "BUDGET", 0)
    assert scatterpar.doctor(TWO).passed
