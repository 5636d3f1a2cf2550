"""A chain of devices: every device gets the first one's values, once."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import randn

from scatterpar.devices import coalescing
from scatterpar.devices.relay import Relay
from scatterpar.devices.transfers import Transfers

pytestmark = [pytest.mark.core, pytest.mark.draws]
SIZES = (40, 3, 700, 1, 90)


def lists(devices):
    """Per device: flat tensors, those of the first device with other values."""
    first = {i: randn(size, seed=i).float() for i, size in enumerate(SIZES)}
    first[9] = torch.arange(33)
    return [first] + [
        {key: torch.full_like(tensor, 7) for key, tensor in first.items()}
        for _ in range(devices - 1)
    ]


@pytest.mark.parametrize("chunk", [2**26, 256])
@pytest.mark.parametrize("devices", [3, 4, 5, 8])
def test_all_get_values_of_the_first(devices, chunk, monkeypatch):
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", chunk)
    flat = lists(devices)
    transfers = Transfers()
    names = [torch.device("cpu", number) for number in range(devices)]
    Relay(flat, names).send(transfers, "replicate")
    for other in flat[1:]:
        assert all(torch.equal(other[key], flat[0][key]) for key in flat[0])
    size = sum(tensor.nbytes for tensor in flat[0].values())
    assert transfers.bytes["replicate"] == (devices - 1) * size


def test_each_device_sends_to_its_neighbour(monkeypatch):
    """No device sends a byte twice: in a tree the first one sends to two of three."""
    sent = []

    class Recorded(Transfers):
        def copy_into(self, target, source, phase):
            sent.append((source.storage_offset(), target.storage_offset()))
            super().copy_into(target, source, phase)

    # Of one storage, so that offsets say whose elements these are.
    memory = torch.zeros(4, 128)
    memory[0] = torch.arange(128)
    flat = [{0: row} for row in memory]
    names = [torch.device("cpu", number) for number in range(4)]
    Relay(flat, names).send(Recorded(), "replicate")
    assert torch.equal(memory, memory[:1].expand(4, -1))
    hops = [(source // 128, target // 128) for source, target in sent]
    assert sorted(set(hops)) == [(0, 1), (1, 2), (2, 3)]
