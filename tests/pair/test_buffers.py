"""Buffers: replica 0's, in the module after the forward, and only where they changed."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import assert_close, assert_gradients, build, gradients, randint, randn
from helpers.zoo import OVERLAPPING, Overlapping
from torch import nn

from pair.common import Pair
from scatterpar import DataParallelCriterion, DataParallelModel

INPUTS = randn(9, FEATURES)


def norm():
    return build(
        lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    )


def test_running_statistics_are_those_of_replica_0(placed):
    model = norm()
    twin = copy.deepcopy(model)
    kept = {name: id(buffer) for name, buffer in model.named_buffers()}
    pair = DataParallelModel(model, placed(4))
    for step in (1, 2, 3):
        pair(INPUTS)
        twin(INPUTS[:3])
        assert model[1].num_batches_tracked == step
        for (name, mine), its in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, its), name
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == kept


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_running_statistics_without_grad(placed, mode):
    model, twin = norm(), norm()
    with mode():
        DataParallelModel(model, placed(4))(INPUTS)
        twin(INPUTS[:3])
    assert_close(model[1].running_mean, twin[1].running_mean, "mean")


def test_no_change_in_eval(placed):
    model = norm().eval()
    before = copy.deepcopy(model.state_dict())
    versions = [buffer._version for buffer in model.buffers()]
    DataParallelModel(model, placed(4))(INPUTS)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert [buffer._version for buffer in model.buffers()] == versions


def test_a_layer_left_in_training_inside_a_model_in_eval(placed):
    model = norm().eval()
    model[1].train()
    DataParallelModel(model, placed(4))(INPUTS)
    assert model[1].num_batches_tracked == 1


def test_gradients_through_batch_statistics_are_each_share_s_own(placed):
    """As on several GPUs: a replica normalises with its own rows."""
    model = norm()
    twin = copy.deepcopy(model)
    targets = randint(CLASSES, 9)
    outputs = torch.cat([twin(INPUTS[:3]), twin(INPUTS[3:6]), twin(INPUTS[6:])])
    nn.CrossEntropyLoss()(outputs, targets).backward()
    Pair(model, nn.CrossEntropyLoss(), placed(3)).loss(INPUTS, targets).backward()
    assert_gradients(model, gradients(twin))


def test_two_forwards_in_training_before_one_backward(placed):
    model = norm()
    twin = copy.deepcopy(model)
    pair = DataParallelModel(model, placed(3))
    sum(o.square().sum() for _ in range(2) for o in pair(INPUTS)).backward()
    pieces = [INPUTS[:3], INPUTS[3:6], INPUTS[6:]]
    (2 * sum(twin(piece).square().sum() for piece in pieces)).backward()
    assert_gradients(model, gradients(twin))
    assert model[1].num_batches_tracked == 2


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rebound", torch.zeros(2).double())
        self.register_buffer("grown", torch.zeros(1).double())
        self.register_buffer("absent", None)
        self.stranger = [nn.BatchNorm1d(FEATURES).double()]

    def forward(self, inputs):
        self.rebound = self.rebound + inputs[0, 0]
        self.grown = torch.cat([self.grown, inputs[0, :1]])
        self.absent = inputs[0, :2].clone()
        self.register_buffer("fresh", inputs[0, :1].clone())
        return self.stranger[0](inputs)


def test_buffers_that_a_forward_rebinds_resizes_or_registers(placed):
    model, twin = Writes(), Writes()
    DataParallelModel(model, placed(4))(INPUTS)
    twin(INPUTS[:3])
    assert model.state_dict().keys() == twin.state_dict().keys()
    for name, buffer in twin.named_buffers():
        assert_close(model.get_buffer(name), buffer, name)
    assert_close(model.stranger[0].running_mean, twin.stranger[0].running_mean, "unregistered")


def test_buffers_of_the_criterion(placed):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros((), dtype=torch.long))

        def forward(self, output, targets):
            self.rows += len(targets)
            return (output - targets).square().mean()

    criterion = Counts()
    pair = DataParallelCriterion(criterion, placed(4))
    for _ in range(2):
        pair(DataParallelModel(nn.Identity(), placed(4))(INPUTS), INPUTS)
    assert criterion.rows == 6


def test_a_failed_forward_leaves_them_as_they_were(placed):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES).double()

        def forward(self, inputs):
            output = self.norm(inputs)
            if inputs[0, 0] == INPUTS[-2, 0]:
                raise ArithmeticError("no")
            return output

    model = Fails()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArithmeticError):
        DataParallelModel(model, placed(4))(INPUTS)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


@pytest.mark.parametrize("as_buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("other", OVERLAPPING)
def test_what_overlaps_in_memory_does_so_in_replicas(placed, other, as_buffer):
    model = build(lambda: Overlapping(other, as_buffer))
    expected = copy.deepcopy(model)
    targets = randint(CLASSES, 9)
    pair, criterion = DataParallelModel(model, placed(3)), nn.CrossEntropyLoss()
    for _ in range(2):
        DataParallelCriterion(criterion)(pair(INPUTS), targets).backward()
        criterion(expected(INPUTS), targets).backward()
        assert_gradients(model, gradients(expected))
        assert torch.equal(model.table, expected.table)
        assert torch.equal(model.other, expected.other)
