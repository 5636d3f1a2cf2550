"""StreamsOfCalls, with streams that record for which others they wait."""

from __future__ import annotations

import pytest
import torch

from scatterpar.calls import streams_of_calls
from scatterpar.calls.streams_of_calls import StreamsOfCalls

DEVICES = [torch.device("cpu", 0), torch.device("cpu", 1)]


class Stream:
    def __init__(self, device, name):
        self.device = device
        self.name = name
        self.waits = []

    def wait_stream(self, other):
        self.waits.append(other.name)


@pytest.fixture
def present(monkeypatch):
    """The current stream of each device, to be exchanged by tests."""
    streams = {device: Stream(device, f"first of {device}") for device in DEVICES}
    monkeypatch.setattr(streams_of_calls, "has_streams", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.__getitem__)
    return streams


def test_other_streams_wait_for_earlier_ones(present):
    streams = StreamsOfCalls(DEVICES)
    with streams.of_call():
        pass
    present[DEVICES[1]] = other = Stream(DEVICES[1], "second")
    with streams.of_call():
        assert other.waits == ["first of cpu:1"]
    assert present[DEVICES[0]].waits == []


def test_same_streams_wait_for_nothing(present):
    streams = StreamsOfCalls([*DEVICES, DEVICES[0]])
    for _ in range(3):
        with streams.of_call():
            pass
    assert not any(stream.waits for stream in present.values())


def test_devices_without_streams_have_none():
    streams = StreamsOfCalls(DEVICES)
    with streams.of_call(), streams.used_by_node():
        streams.record([{0: torch.zeros(2)}])
        streams.record_here([None, torch.zeros(2)])
