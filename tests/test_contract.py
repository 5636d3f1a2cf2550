"""Sentences of the design, tried by somebody who knows nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.oracle import assert_step, build, randn, seeded
from torch import nn

from scatterpar import ScatterOnceParallel

LAYOUTS = (["cpu"], ["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"])


class MakesItsHead(nn.Module):
    """Its head comes with the first batch, as wide as that."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.head = None

    def forward(self, inputs):
        if self.head is None:
            self.head = nn.Linear(6, 2).double()
        return self.head(self.enter(inputs))


class ExchangesItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.exchanges = True

    def forward(self, inputs):
        if self.exchanges:
            self.head.weight = nn.Parameter(self.head.weight * 0.5)
        return self.head(inputs)


@pytest.mark.parametrize("device_ids", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", [MakesItsHead, ExchangesItsWeight])
def test_parameters_that_a_forward_pass_makes_are_refused_by_name(device_ids, kind):
    model = build(kind)
    inputs, targets, criterion = randn(9, 4), randn(9, 2), nn.MSELoss()
    engine = ScatterOnceParallel(model, 2, device_ids)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"makes the parameter 'head\.weight'.*before the first"
        ):
            engine.forward_backward(inputs, targets, criterion)
        with (
            pytest.raises(ValueError, match=r"makes the parameter 'head\.weight'"),
            torch.no_grad(),
        ):
            engine(inputs)
        assert all(parameter.grad is None for parameter in model.parameters())
    model.exchanges = False
    with seeded():
        model(inputs)
    assert_step(engine, inputs, targets, criterion)


class WithTeacher(nn.Module):
    """It computes its own loss: the student's distance from what it was at first."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs):
        return nn.functional.mse_loss(self.student(inputs), self.teacher(inputs))


@pytest.mark.parametrize("device_ids", LAYOUTS, ids=str)
def test_a_student_that_begins_as_its_teacher_is_no_false_alarm(device_ids):
    both, inputs = build(WithTeacher), randn(33, 4)

    def distance(output, inputs):
        with torch.no_grad():
            expected = both.teacher(inputs)
        return nn.functional.mse_loss(output, expected)

    def divergence(output, inputs):
        with torch.no_grad():
            expected = both.teacher(inputs).log_softmax(1)
        both_logs = output.log_softmax(1), expected
        return nn.functional.kl_div(*both_logs, reduction="batchmean", log_target=True)

    engine = ScatterOnceParallel(both.student, 2, device_ids)
    for criterion in (distance, divergence):
        assert engine.forward_backward(inputs, inputs, criterion).item() < 1e-20
    assert ScatterOnceParallel(both, 2, device_ids).forward_backward(inputs).item() < 1e-20
    with pytest.raises(ValueError, match="whole_batch=True"):
        engine.forward_backward(
            inputs, inputs, lambda *args: 33 * (distance(*args) + args[0].std())
        )
