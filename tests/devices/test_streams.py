"""Streams: which one a use gets. With devices that have some: ``cards/`` and ``nullcuda/``."""

from __future__ import annotations

import contextlib
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from scatterpar.devices import streams
from scatterpar.devices.virtual_devices import HOST

pytestmark = pytest.mark.core
DEVICE = torch.device("cuda:0")


def test_host_has_no_streams():
    for device in (HOST, torch.device("cpu:1")):
        assert not streams.is_async(device)
        assert not streams.has_streams(device)
        assert streams.stream_for("arriving", device) is None
        streams.synchronize(device)  # nothing to wait for
        with streams.use_device(device, ()):
            assert torch.empty(1).device == HOST


def test_device_of_failing_streams_has_none(monkeypatch):
    """A GPU that is full fails at its first use, and has streams when it is free again."""
    tries = []

    def stream(*_):
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return SimpleNamespace(record_event=lambda: None)

    monkeypatch.setattr(streams.torch, "Stream", stream)
    monkeypatch.setattr(streams, "use_device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(streams, "_devices_with_streams", set())
    answers = [streams.has_streams(DEVICE) for _ in range(3)]
    assert answers == [False, True, True]
    assert len(tries) == 3  # one that failed, and two streams


@pytest.mark.parametrize("is_initialized", [True, False])
def test_unused_accelerator_is_not_asked(monkeypatch, is_initialized):
    """Asking for its streams would initialise it, and forked children could not use it."""
    current = SimpleNamespace(stream_id=7)
    fake = SimpleNamespace(
        accelerator=SimpleNamespace(
            current_accelerator=lambda **_: DEVICE,
            device_count=lambda: 1,
            current_stream=lambda _: current,
        ),
        get_device_module=lambda _: SimpleNamespace(
            is_initialized=lambda: is_initialized
        ),
    )
    monkeypatch.setattr(streams, "torch", fake)
    assert streams.current_streams() == ((current,) if is_initialized else ())


@pytest.fixture
def pool(monkeypatch):
    """A device with a pool of streams 1 to 4, of which the caller is on stream 2."""
    numbers = cycle([1, 2, 3, 4])

    def stream(*_, stream_id=None, **__):
        return SimpleNamespace(
            stream_id=next(numbers) if stream_id is None else stream_id,
            device_index=0,
            device_type=1,
        )

    fake = SimpleNamespace(
        Stream=stream,
        accelerator=SimpleNamespace(current_stream=lambda _: stream(stream_id=2)),
    )
    monkeypatch.setattr(streams, "torch", fake)
    monkeypatch.setattr(streams, "has_streams", lambda _: True)
    monkeypatch.setattr(streams, "_streams", {})


def test_each_use_keeps_its_own_stream(pool):
    """Not 2, which the caller is on; and the fourth in turn would be 1 again."""
    uses = ["arriving", "sending", "recording", "sending", "arriving"]
    numbers = [streams.stream_for(use, DEVICE).stream_id for use in uses]
    assert numbers == [1, 3, 4, 3, 1]


def test_threads_get_objects_of_their_own(pool):
    first = streams.stream_for("arriving", DEVICE)
    assert streams.stream_for("arriving", DEVICE) is not first
