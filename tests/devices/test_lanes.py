"""Copies through lanes; with devices that have streams: ``cards/`` and ``nullcuda/``."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.lanes import Lanes
from scatterpar.devices.transfers import Transfers

pytestmark = pytest.mark.core


def test_devices_without_streams_copy_at_once():
    first, second = torch.device("cpu:0"), torch.device("cpu:1")
    source = torch.arange(3.0)
    target = torch.zeros(3)
    transfers = Transfers()
    with Lanes([first, second], transfers, "replicate") as lanes:
        lanes.use_departing(first)
        lanes.send(source, first, target, second)
        assert target.tolist() == [0, 1, 2]
        lanes.send_arrived(second)
        lanes.receive_after(lanes.sent(first), second)
        lanes.use_arriving(second)
    assert transfers.bytes["replicate"] == 12
    assert transfers.messages["replicate"] == 1
