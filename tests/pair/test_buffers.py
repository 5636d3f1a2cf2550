"""Buffers: replica 0's, in the module after the forward, and only where they changed."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES
from harness.oracle import assert_close, build, randn
from torch import nn

from pair.common import Pair, assert_alike
from scatterpar import DataParallelModel

pytestmark = pytest.mark.core

INPUTS = randn(9, FEATURES)


def normalised():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_running_statistics_without_grad(devices, mode):
    model, twin = build(normalised), build(normalised)
    with mode():
        DataParallelModel(model, devices(4))(INPUTS)
        twin(INPUTS[:3])
    assert_close(model[1].running_mean, twin[1].running_mean, "mean")


def test_no_change_in_eval(devices):
    """Nor are they written with what they had: a graph of the user's own may need them."""
    model = build(normalised).eval()
    before = copy.deepcopy(model.state_dict())
    loss = model(INPUTS).square().sum()
    DataParallelModel(model, devices(4))(INPUTS)
    loss.backward()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


def test_two_forwards_in_training_before_one_backward(devices):
    def program(of):
        pieces = [INPUTS] if isinstance(of, Pair) else INPUTS.split(3)
        outputs = [of.outputs(piece) for _ in range(2) for piece in pieces]
        sum(output.square().sum() for output in outputs).backward()

    pair = assert_alike(normalised, program, devices(3))
    assert pair.module[1].num_batches_tracked == 2


def test_buffers_of_the_criterion(devices):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros((), dtype=torch.long))

        def forward(self, output, targets):
            self.rows += len(targets)
            return (output - targets).square().mean()

    pair = Pair(nn.Identity(), Counts(), devices(4))
    for _ in range(2):
        pair.loss(INPUTS, INPUTS)
    assert pair.plain_criterion.rows == 6


def test_a_failed_forward_leaves_them_as_they_were(devices):
    class Fails(nn.BatchNorm1d):
        def forward(self, inputs):
            output = super().forward(inputs)
            if inputs[0, 0] == INPUTS[-2, 0]:
                raise ArithmeticError("no")
            return output

    model = build(lambda: Fails(FEATURES))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArithmeticError):
        DataParallelModel(model, devices(4))(INPUTS)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
