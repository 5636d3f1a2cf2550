"""A chain of devices: every device gets the first one's values, once."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import randn

from scatterpar.devices import coalescing, pieces
from scatterpar.devices.relay import Relay
from scatterpar.devices.transfers import Transfers

pytestmark = [pytest.mark.core, pytest.mark.draws]
SIZES = (40, 3, 700, 1, 90)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces of any size are worth a copy."""
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)


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


def test_packed_pieces_unpacked_together(monkeypatch):
    """In one call per receiver and dtype, not in one per piece."""
    calls = []
    split = torch.split_with_sizes_copy

    def counted(packed, sizes, *, out):
        calls.append((packed.dtype, len(sizes)))
        split(packed, sizes, out=out)

    monkeypatch.setattr(torch, "split_with_sizes_copy", counted)
    first = {i: randn(20, seed=i).float() for i in range(40)}
    first |= {40 + i: torch.arange(5) + i for i in range(20)}
    flat = [first] + [
        {key: torch.full_like(tensor, 7) for key, tensor in first.items()}
        for _ in range(3)
    ]
    names = [torch.device("cpu", number) for number in range(4)]
    relay = Relay(flat, names)
    versions = [tensor._version for tensor in flat[3].values()]
    for _ in range(2):
        first[3] += 1
        relay.send(Transfers(), "replicate")
        for other in flat[1:]:
            assert all(torch.equal(other[key], first[key]) for key in first)
    # 800 and 100 elements, in three pieces each, of which two parts are cut.
    assert len(calls) == 2 * 3 * 2
    assert {dtype for dtype, _ in calls} == {torch.float32, torch.int64}
    assert {num_parts for dtype, num_parts in calls if dtype == torch.float32} == {42}
    assert all(
        now > before
        for now, before in zip(
            (tensor._version for tensor in flat[3].values()), versions, strict=True
        )
    )
