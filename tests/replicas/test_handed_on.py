"""Buffers and flags from call to call, on replicas in one memory and in two."""

from __future__ import annotations

import pytest
import torch
from harness.models import FEATURES
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.devices.transfers import Transfers

pytestmark = pytest.mark.draws
LAYOUTS = pytest.mark.parametrize("devices", [["cpu"] * 2, ["cpu:0", "cpu:1"]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("large", torch.zeros(2**19))  # a message of its own
        self.register_buffer("same", torch.ones(3))


def engine_of(devices):
    engine = ScatterOnceParallel(Net(), device_ids=devices)
    assert len(engine.replicas) == 2
    return engine._replicas.of_model


class Turn:
    """A call in which the user's module has a replica's tensors."""

    def __init__(self, replica_set, number):
        self.replica_set = replica_set
        self.replica = replica_set.replicas[number]
        self.net = replica_set.root
        self.centre = self.replica.copy_of(self.net.centre)
        self.large = self.replica.copy_of(self.net.large)
        self.weight = self.replica.copy_of(self.net.layer.weight)

    def __enter__(self):
        handed_on = self.replica_set.handed_on
        handed_on.begin(self.replica.tensors, self.replica.device)
        return self

    def __exit__(self, *_):
        handed_on = self.replica_set.handed_on
        tensors, device = self.replica.tensors, self.replica.device
        self.rebound = handed_on.put_back(tensors)
        self.begun = handed_on.end(tensors, device, self.rebound)


def test_parameter_named_as_buffer_not_handed_on():
    """Replicas share it, and ``ParameterGuard`` refuses that a call writes it."""
    net = Net()
    net.register_buffer("tied", net.layer.weight)
    engine = ScatterOnceParallel(net, device_ids=["cpu"] * 2)
    assert len(engine.replicas) == 2
    replica_set = engine._replicas.of_model
    with Turn(replica_set, 0) as turn, torch.no_grad():
        turn.weight += 1
        turn.centre += 1
    values = replica_set.handed_on.values(torch.device("cpu"), Transfers())
    written = {name for _, name, _ in values}
    assert "centre" in written
    assert "tied" not in written


@LAYOUTS
def test_latest_values_reach_the_next_call(devices):
    replica_set = engine_of(devices)
    for call in range(4):
        with Turn(replica_set, call % 2) as turn:
            assert turn.centre.tolist() == [call, call]
            assert turn.large[-1] == 2 * call
            turn.centre += 1
            turn.large.data.add_(2)  # no version counts it
    net = replica_set.root
    assert not net.centre.any()
    values = {
        name: value
        for _, name, value in replica_set.handed_on.values(
            torch.device(devices[0]), Transfers()
        )
    }
    assert values["centre"].tolist() == [4, 4]
    assert values["large"][0] == 8
    assert "same" not in values
    # kernels of normalisations write without a version
    assert "running_mean" in values


def test_rebound_buffer_keeps_its_tensor():
    replica_set = engine_of(["cpu"] * 2)
    net = replica_set.root
    buffer = net.centre
    with Turn(replica_set, 0) as turn:
        new = torch.full((2,), 3.0)
        net.centre = new
    assert net.centre is buffer
    assert [value.data_ptr() for value in turn.rebound.values()] == [new.data_ptr()]
    with Turn(replica_set, 1) as turn:
        assert turn.centre.tolist() == [3, 3]
        net.centre = torch.zeros(5)  # of another shape: it stays
    assert len(net.centre) == 5
    assert not turn.rebound


def test_flags_reach_the_next_call_and_the_user():
    replica_set = engine_of(["cpu"] * 2)
    net = replica_set.root
    with Turn(replica_set, 0) as turn:
        turn.weight.requires_grad_(False)
    assert not net.layer.weight.requires_grad
    with Turn(replica_set, 1) as turn:
        assert not turn.weight.requires_grad
        turn.weight.requires_grad_(True)
    assert [replica_set.tensors[n] is net.layer.weight for n in turn.begun] == [True]
    assert net.layer.weight.requires_grad


def test_step_begins_without_values():
    replica_set = engine_of(["cpu"] * 2)
    with Turn(replica_set, 0) as turn:
        turn.centre += 1
    assert replica_set.handed_on.was_lent
    replica_set.handed_on.begin_step("mode", Transfers())
    assert not replica_set.handed_on.was_lent
    assert not [*replica_set.handed_on.values(torch.device("cpu"), Transfers())]


def spare_engine(devices):
    """An engine whose network has a frozen layer."""
    net = Net()
    net.spare = nn.Linear(2, 2).requires_grad_(False)
    nn.init.ones_(net.spare.weight)  # sums of whole numbers are exact
    engine = ScatterOnceParallel(net, device_ids=devices)
    assert len(engine.replicas) == 2
    return engine


class SpareTurn(Turn):
    """A turn that writes the frozen layer."""

    def __init__(self, engine, number):
        replica_set = engine._replicas.of_model
        super().__init__(replica_set, number)
        self.spare = self.replica.copy_of(self.net.spare.weight)


def last_values(engine):
    """The parameters and buffers that calls have written, by the ``id`` of each."""
    handed_on = engine._replicas.of_model.handed_on
    device = engine.device_ids[0]
    return {
        id(registry[name]): value
        for registry, name, value in handed_on.values(device, Transfers())
    }


@LAYOUTS
def test_written_frozen_parameter_is_handed_on(devices):
    engine = spare_engine(devices)
    net = engine.module
    before = net.spare.weight.clone()
    for step in range(2):
        for call in range(4):
            with SpareTurn(engine, call % 2) as turn:
                assert torch.equal(turn.spare, before + call)
                turn.spare.add_(1)
        values = last_values(engine)
        assert torch.equal(values[id(net.spare.weight)], before + 4)
        assert id(net.spare.bias) not in values
        # The first step has written it where it was.
        net.spare.weight.copy_(before)
        builds = turn.replica_set.builds
        assert len(engine.replicas) == 2
        # From then on each replica has its own.
        assert turn.replica_set.builds == builds + (step == 0)
    with SpareTurn(engine, 0) as turn:
        turn.spare.add_(1)
    assert torch.equal(net.spare.weight, before)


def test_write_that_a_look_saw_has_own_memory():
    engine = spare_engine(["cpu"] * 2)
    net = engine.module
    replica_set = engine._replicas.of_model
    replica_set.handed_on.expect_write(net.spare.weight)
    replica_set.handed_on.expect_write(net.layer.weight)  # trained: refused elsewhere
    assert engine._replicas.were_found_to_write()
    assert len(engine.replicas) == 2
    assert not engine._replicas.were_found_to_write()
    with SpareTurn(engine, 1) as turn:
        turn.spare.zero_()
        assert turn.weight.data_ptr() == net.layer.weight.data_ptr()
    assert net.spare.weight.all()


def test_parameter_trained_again_is_shared_again():
    engine = spare_engine(["cpu"] * 2)
    net = engine.module
    with SpareTurn(engine, 0) as turn:
        turn.spare.add_(1)
    assert len(engine.replicas) == 2
    assert SpareTurn(engine, 0).spare.data_ptr() != net.spare.weight.data_ptr()
    net.spare.requires_grad_(True)
    assert len(engine.replicas) == 2
    assert SpareTurn(engine, 0).spare.data_ptr() == net.spare.weight.data_ptr()


def test_memory_of_a_trained_one_is_not_handed_on():
    engine = spare_engine(["cpu"] * 2)
    net = engine.module
    net.spare.bias.data = net.layer.bias.data
    assert len(engine.replicas) == 2
    with SpareTurn(engine, 0) as turn:
        turn.replica.copy_of(net.spare.bias).add_(1)
    assert not turn.replica_set.handed_on.begun


def test_pending_backward_pass_raises_after_write():
    """It would read the value of a later call in silence."""
    engine = spare_engine(["cpu"] * 2)
    rows = torch.ones(3, 2, requires_grad=True)
    with SpareTurn(engine, 0) as turn:
        loss = (rows @ turn.spare).sum()
    with SpareTurn(engine, 1) as turn:
        turn.spare.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
