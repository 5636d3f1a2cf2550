"""Which tensors are sent to which memories; in steps: ``devices/test_transfers.py``."""

from __future__ import annotations

import numpy
import pytest
import torch
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.devices import pieces
from scatterpar.devices.bits import same_bits
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.replicas.module_contents import ModuleContents

pytestmark = pytest.mark.core
DEVICES = [torch.device(f"cpu:{number}") for number in range(3)]


def layer():
    """Four parameters in one tensor, and a buffer of two elements."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(4.0))
    module.mean = nn.Buffer(torch.ones(2))
    return module


@pytest.fixture
def module():
    return layer()


@pytest.fixture
def broadcast(module):
    return Broadcast(ModuleContents((module,)), DEVICES)


def sent(broadcast):
    """The bytes that an update sends."""
    transfers = Transfers()
    with torch.no_grad():
        broadcast.send_changed(transfers, broadcast.compare())
    return transfers.bytes["replicate"]


def assert_everywhere(broadcast, module):
    for device in DEVICES:
        weight, mean = broadcast.at(device)
        assert torch.equal(weight, module.weight)
        assert torch.equal(mean, module.mean)


EVERYTHING = 2 * (16 + 8)  # to two devices


def test_everything_sent_first_then_nothing(broadcast, module):
    assert sent(broadcast) == EVERYTHING
    assert_everywhere(broadcast, module)
    assert sent(broadcast) == 0


def changed_in(broadcast, module, steps):
    """Whether each of some steps compared values, after a commit of statistics."""
    compared = []
    for _ in range(steps):
        write(module)
        write_buffer(module)
        module.mean.add_(1)
        comparison = broadcast.compare()
        compared.append(len(comparison.compared))
        with torch.no_grad():
            broadcast.send_changed(Transfers(), comparison)
        assert_everywhere(broadcast, module)
    return compared


def test_buffers_that_change_are_not_compared(broadcast, module):
    """The host waited for the answer in each step; in each 16th it still asks."""
    assert changed_in(broadcast, module, 33) == [0, 1, 1, *[0] * 12, 1, *[0] * 15, 1, 0]
    broadcast.expect_no_change()
    assert changed_in(broadcast, module, 4) == [1, 1, 0, 0]


def test_buffers_that_stop_changing_are_not_sent(broadcast, module):
    """Also if their version changes in each step, as after commits in eval mode."""
    changed_in(broadcast, module, 5)
    sizes = []
    for _ in range(14):
        module.mean.add_(0)
        sizes.append(sent(broadcast))
    # Until they are compared, in the 16th step.
    assert sizes == [2 * 8] * 10 + [0] * 4


def test_unseen_write_of_a_changing_buffer_is_sent(broadcast, module):
    """It is compared in each step in which its version has not changed."""
    changed_in(broadcast, module, 5)
    module.mean.data[0] = 9
    assert sent(broadcast) == 2 * 8
    assert_everywhere(broadcast, module)


def write(module):
    with torch.no_grad():
        module.weight.add_(1)


def write_data(module):
    module.weight.data[0] += 1


def write_buffer(module):
    module.mean[1] = 3


def write_the_same_values(module):
    with torch.no_grad():
        module.weight.mul_(1)


CHANGES = [
    (write, 2 * 16),
    (write_data, 2 * 16),
    (write_buffer, 2 * 8),
    (write_the_same_values, 2 * 16),  # its version has changed
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_changed_tensors_are_sent(broadcast, module, change, expected):
    sent(broadcast)
    change(module)
    assert sent(broadcast) == expected
    assert_everywhere(broadcast, module)


def test_five_devices_get_four_copies(module):
    """Of 16 and 8 bytes each; a change of the buffer sends 8 bytes to each again."""
    devices = [torch.device("cpu", number) for number in range(5)]
    broadcast = Broadcast(ModuleContents((module,)), devices)
    assert sent(broadcast) == 4 * (16 + 8)
    write_buffer(module)
    assert sent(broadcast) == 4 * 8
    memories = set()
    for device in devices:
        weight, mean = broadcast.at(device)
        assert weight.tolist() == [0, 1, 2, 3]
        assert mean.tolist() == [1, 3]
        memories.add(weight.data_ptr())
    assert len(memories) == 5


def test_everything_sent_after_failure(broadcast, module, monkeypatch):
    sent(broadcast)
    write(module)

    def failing(*_):
        raise OSError("device lost")

    with monkeypatch.context() as context:
        context.setattr(Transfers, "copy_into", failing)
        context.setattr(Transfers, "copy", failing)
        with pytest.raises(OSError, match="device lost"):
            sent(broadcast)
    assert sent(broadcast) == EVERYTHING
    assert_everywhere(broadcast, module)


def test_owners_send_to_all_others(broadcast, module):
    sent(broadcast)
    transfers = Transfers()
    with torch.no_grad():
        broadcast.at(DEVICES[2])[0].fill_(7)
        broadcast.send_owned({0: DEVICES[2]}, transfers)
    assert transfers.bytes["replicate"] == 2 * 16
    assert module.weight.tolist() == [7.0] * 4
    assert_everywhere(broadcast, module)
    assert sent(broadcast) == 0


def test_storages_renew_buffers_only(broadcast):
    weight, mean = broadcast.at(DEVICES[1])
    new_weight, new_mean = broadcast.storages(DEVICES[1])
    assert new_weight is weight
    assert new_mean.data_ptr() != mean.data_ptr()
    assert new_mean.shape == mean.shape


def test_adopt_storages_tells_changed_shapes(broadcast, module):
    assert broadcast.adopt_storages()
    module.weight.data = module.weight.data[:2]
    assert not broadcast.adopt_storages()
    assert not broadcast.adopt(ModuleContents((layer(),)), DEVICES)


def test_moved_storage_is_adopted_once(module, broadcast):
    """Captured sub-steps have the former address."""
    places = broadcast.places
    module.weight.data.share_memory_()
    assert broadcast.adopt_storages(have_same_forms=True)
    assert broadcast.places is not places
    places = broadcast.places
    assert broadcast.adopt_storages(have_same_forms=True)
    assert broadcast.places is places


def test_former_address_is_of_another_storage(module, broadcast):
    array = numpy.ones(4, dtype=numpy.float32)
    module.weight.data = torch.from_numpy(array)
    assert broadcast.adopt_storages()
    places = broadcast.places
    module.weight.share_memory_()  # moves the storage; the array stays
    module.weight.data = torch.from_numpy(array)
    assert broadcast.adopt_storages(have_same_forms=True)
    assert broadcast.places is not places


def test_other_devices_are_other_broadcast(module, broadcast):
    contents = ModuleContents((module,))
    assert broadcast.adopt(contents, [*DEVICES, DEVICES[1]])
    assert not broadcast.adopt(contents, DEVICES[:2])


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("exchanges", [False, True])
def test_views_of_the_last_step_have_values_of_now(
    broadcast, module, exchanges, relays, monkeypatch
):
    """They are kept for the next step, unless the user has exchanged a storage."""
    if relays:
        monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)
    for step in range(3):
        with torch.no_grad():
            if exchanges:
                module.weight.data = torch.full((4,), float(step))
                assert broadcast.adopt_storages()
            else:
                module.weight.fill_(step)
            module.mean.add_(1)
        assert sent(broadcast) == EVERYTHING
        assert_everywhere(broadcast, module)


def test_relay_of_other_tensors_is_another(broadcast, module, monkeypatch):
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)
    assert sent(broadcast) == EVERYTHING
    for change in (write, write_buffer, write):
        with torch.no_grad():
            change(module)
        sent(broadcast)
        assert_everywhere(broadcast, module)


def test_arrival_of_packed_tensors_is_counted(broadcast, module):
    """A graph that has saved a copy refuses its backward pass afterwards."""
    sent(broadcast)
    before = [tensor._version for tensor in broadcast.at(DEVICES[1])]
    with torch.no_grad():
        module.weight.add_(1)
        module.mean.add_(1)
    sent(broadcast)
    after = [tensor._version for tensor in broadcast.at(DEVICES[1])]
    assert all(now > earlier for now, earlier in zip(after, before, strict=True))


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize(
    "exchange",
    [torch.Tensor.double, lambda tensor: tensor.to(memory_format=torch.channels_last)],
    ids=["double", "channels last"],
)
@pytest.mark.parametrize("owner", [0, 1])
def test_owner_has_exchanged_a_storage(exchange, owner, relays, monkeypatch):
    """For one of another dtype, or of other strides."""
    if relays:
        monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, 3, 2, 2))
    module.bias = nn.Parameter(torch.ones(3))
    broadcast = Broadcast(ModuleContents((module,)), DEVICES)
    sent(broadcast)
    for seed in range(2):
        values = [randn(*shape, seed=seed).float() for shape in ((2, 3, 2, 2), (3,))]
        module.weight.data = exchange(module.weight.data)
        with torch.no_grad():
            for tensor, value in zip(broadcast.at(DEVICES[owner]), values, strict=True):
                tensor.copy_(value)
            broadcast.send_owned(dict.fromkeys(range(2), DEVICES[owner]), Transfers())
        for device in DEVICES:
            for tensor, value in zip(broadcast.at(device), values, strict=True):
                assert torch.equal(tensor.float(), value)


class Subclass(torch.Tensor):
    """A tensor of a class of the user's."""


def test_tensor_of_a_subclass_is_sent(module):
    module.own = torch.ones(2).as_subclass(Subclass)
    broadcast = Broadcast(ModuleContents((module,)), DEVICES)
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.own.fill_(value)
        sent(broadcast)
        for device in DEVICES:
            _, _, own = broadcast.at(device)
            assert own.tolist() == [value, value]


def test_relay_packs_dtypes_together(monkeypatch):
    """Bit for bit, in as few copies as tensors of one dtype."""
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)
    messages: list[int] = []
    for count in (torch.tensor(-0.0), torch.tensor(2**40 + 1)):
        module = layer()
        module.count = nn.Buffer(count)
        with torch.no_grad():
            module.weight[0] = -0.0
            # A NaN with a payload, which a conversion might not keep.
            module.weight[1:2].view(torch.int32).fill_(0x7FA00001)
        broadcast = Broadcast(ModuleContents((module,)), DEVICES)
        transfers = Transfers()
        with torch.no_grad():
            broadcast.send_changed(transfers, broadcast.compare())
        messages.append(transfers.messages["replicate"])
        for device in DEVICES:
            for sent_to, of_user in zip(
                broadcast.at(device), broadcast.at(DEVICES[0]), strict=True
            ):
                assert same_bits(sent_to, of_user)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("has_statistics", [True, False])
def test_running_statistics_are_rarely_compared(has_statistics, monkeypatch):
    """They differ in each step, and the host would wait for an answer that it knows."""
    steps: list[int] = []
    fingerprints = Broadcast._fingerprints

    def counted(broadcast, *arguments):
        steps.append(step)
        return fingerprints(broadcast, *arguments)

    monkeypatch.setattr(Broadcast, "_fingerprints", counted)
    norm = nn.BatchNorm1d(4, track_running_stats=has_statistics)
    model = build(lambda: nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    devices = ["cpu:0", "cpu:1"]
    with ScatterOnceParallel(model, 1, devices, verify=False) as engine:
        for step in range(20):
            engine.forward_backward(randn(8, 3, seed=step), None, torch.sum)
            optimizer.step()
    # Step 0 has sent nothing yet; the 16th comparison is of step 15.
    assert set(steps) == ({1, 2, 15} if has_statistics else set())
