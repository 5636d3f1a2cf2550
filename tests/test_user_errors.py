"""What the user's code raises arrives as it is, where the user called, and undoes the step."""

from __future__ import annotations

import threading
import traceback

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_step, build, randint, randn
from helpers.touchy import Touchy, assert_arrives_from_everywhere
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS = randn(12, FEATURES)
LABELS = randint(CLASSES, 12)
LOSS = nn.CrossEntropyLoss()


class MyError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class FailsOn(nn.Module):
    """Raises ``error`` for a micro-batch that holds one of ``rows``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.errors = Errors()

    def forward(self, inputs):
        for row, error in self.errors.by_row.items():
            if (inputs == ROWS[row]).all(1).any():
                self.errors.wait()
                raise error
        return self.linear(self.norm(inputs))


class Errors:
    def __init__(self):
        self.by_row = {}
        self.barrier = None

    def wait(self):
        if self.barrier is not None:
            self.barrier.wait(120)


def state(model):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def same(before, after):
    return all(
        (a is None) if b is None else torch.equal(a, b) for b, a in zip(before, after, strict=True)
    )


@pytest.mark.parametrize(
    ("replica", "sub_step", "row"), [(0, 0, 0), (0, 1, 3), (1, 1, 7), (2, 0, 8)]
)
def test_own_object_own_line_and_a_note_of_the_place(devices, replica, sub_step, row):
    model = build(FailsOn)
    error = MyError(7, detail="mine")
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        engine.forward_backward(ROWS, LABELS, LOSS)
        before = state(model)
        model.errors.by_row[row] = error
        with pytest.raises(MyError) as caught:
            engine.forward_backward(ROWS, LABELS, LOSS)
        assert caught.value is error
        assert caught.value.code == 7
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
        assert "raise error" in lines
        assert any("engine.forward_backward" in line for line in lines)
        (note,) = error.__notes__
        device = devices(3)[replica]
        assert note == (
            f"in replica {replica} on {device}, sub-step {sub_step} of 2, counted from 0"
        )
        assert same(before, state(model))
        model.errors.by_row.clear()
        model.zero_grad()
        model.eval()
        assert_step(engine, ROWS, LABELS, LOSS)


def test_the_lowest_replica_first_and_the_others_noted(devices):
    model = build(FailsOn)
    errors = [MyError(i, detail="together") for i in range(3)]
    model.errors.by_row = {0: errors[0], 4: errors[1], 8: errors[2]}
    model.errors.barrier = threading.Barrier(3)
    with ScatterOnceParallel(model, 1, devices(3)) as engine, pytest.raises(MyError) as caught:
        engine.forward_backward(ROWS, LABELS, LOSS)
    assert caught.value is errors[0]
    assert "replica 1 failed too: MyError('1: together')" in errors[0].__notes__
    assert "replica 2 failed too: MyError('2: together')" in errors[0].__notes__


@pytest.mark.parametrize(
    "error", [StopIteration("in forward"), KeyError("key"), AssertionError(), SystemExit(3)]
)
def test_exceptions_of_every_kind(devices, error):
    model = build(FailsOn)
    model.errors.by_row[5] = error
    with ScatterOnceParallel(model, 2, devices(2)) as engine, pytest.raises(type(error)) as caught:
        engine.forward_backward(ROWS, LABELS, LOSS)
    assert caught.value is error


def test_errors_of_the_criterion(devices):
    def criterion(output, targets):
        if len(targets) == 2:
            raise ZeroDivisionError("in the criterion")
        return LOSS(output, targets)

    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        with pytest.raises(ZeroDivisionError, match="in the criterion") as caught:
            engine.forward_backward(ROWS[:5], LABELS[:5], criterion)  # 2 + 1 and 1 + 1 rows
        assert any(
            "in replica 0" in note and "sub-step 0" in note for note in caught.value.__notes__
        )
        assert all(parameter.grad is None for parameter in engine.parameters())


def test_errors_of_the_backward_pass(devices):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MyError(1, detail="backward")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs):
            return Fails.apply(self.linear(inputs))

    with ScatterOnceParallel(build(Model), 2, devices(2)) as engine:
        with pytest.raises(MyError, match="1: backward"):
            engine.forward_backward(ROWS, LABELS, LOSS)
        assert all(parameter.grad is None for parameter in engine.parameters())


def test_errors_of_count_come_before_anything_runs(devices):
    model = mlp()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))

    def count(inputs, targets):
        raise MyError(2, detail="count")

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(MyError):
            engine.forward_backward(ROWS, LABELS, LOSS, count=count)
        assert not calls


def test_buffers_and_generators_of_a_failed_step_are_as_before(devices):
    model = build(FailsOn)
    with ScatterOnceParallel(model, 2, devices(2), buffers="mean") as engine:
        model.errors.by_row[11] = MyError(1, detail="last row of all")
        before, random_state = state(model), torch.get_rng_state()
        with pytest.raises(MyError):
            engine.forward_backward(ROWS, LABELS, LOSS)
        assert same(before, state(model))
        assert torch.equal(random_state, torch.get_rng_state())


def test_errors_in_inference(devices):
    model = build(FailsOn).eval()
    error = MyError(3, detail="inference")
    model.errors.by_row[10] = error
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        with pytest.raises(MyError) as caught:
            engine(ROWS)
        assert caught.value is error
        assert any("in replica 2" in note and "sub-step 1" in note for note in error.__notes__)
        model.errors.by_row.clear()
        assert engine(ROWS).shape == (12, CLASSES)


def test_a_criterion_that_closes_over_the_user_s_parameters(devices):
    """Weight decay by hand, on the module itself, not on a replica: a failure leaves no trace."""
    model = mlp()

    def criterion(output, targets):
        if fails and (targets == -1).any():
            raise MyError(5, detail="closure")
        return nn.functional.mse_loss(output[:, 0], targets) + model[0].weight.pow(2).sum()

    targets = randn(12)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        fails = False
        assert_step(engine, ROWS, targets, lambda o, t: nn.functional.mse_loss(o[:, 0], t))
        model.zero_grad()
        fails = True
        targets[11] = -1
        with pytest.raises(MyError):
            engine.forward_backward(ROWS, targets, criterion)
        assert [p.grad for p in model.parameters()] == [None] * 4


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_stop_iteration_of_a_tensor_arrives_as_it_is_wherever_it_is_raised(devices, part):
    batch = {"inputs": randn(6, 2), "targets": randn(6, 1)}
    batch[part] = batch[part].as_subclass(Touchy)
    model = build(lambda: nn.Linear(2, 1))
    with ScatterOnceParallel(model, 2, devices(2), verify=False) as engine:
        assert_arrives_from_everywhere(
            lambda: engine.forward_backward(batch["inputs"], batch["targets"], nn.MSELoss())
        )
