"""A call that does not fit is told in words; what the words name fits."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS, LABELS = randn(9, FEATURES), randint(CLASSES, 9)
LOSS = nn.CrossEntropyLoss()


class ByBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch):
        return self.linear(batch["x"])


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, a, b):
        return self.linear(a + b)


@dataclasses.dataclass
class Sample:
    a: torch.Tensor
    b: torch.Tensor


class Reshapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows):
        return self.linear(rows.view(-1, FEATURES))


WAYS = {
    "step": lambda engine, batch: engine.forward_backward(batch, LABELS, LOSS),
    "inference": lambda engine, batch: engine.eval()(batch),
    "map": lambda engine, batch: engine.map(lambda replica, rows: replica(rows), batch),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [linear, Reshapes])
def test_dataclass_in_the_place_of_a_tensor(devices, make, way):
    """torch's own text was "linear(): argument 'input' must be Tensor, not Sample"."""
    batch = Sample(ROWS, ROWS)
    with ScatterOnceParallel(build(make), 2, devices(2)) as engine:
        with pytest.raises(
            TypeError, match=r"a whole Sample, a dataclass.*batch\.a, batch\.b"
        ):
            WAYS[way](engine, batch)
        WAYS[way](engine, (batch.a,))
    with ScatterOnceParallel(build(OfTwo), 2, devices(2)) as engine:
        engine.forward_backward(vars(batch), LABELS, LOSS)


def contrast(output, labels):
    first, second = output[: len(labels)], output[len(labels) :]
    return (first - second).square().mean()


def test_two_views_in_one_tensor(devices):
    """The error's two remedies are followed."""
    views = torch.cat([ROWS, ROWS + 1])
    with ScatterOnceParallel(linear(), 2, devices(2)) as engine:
        with pytest.raises(ValueError, match="a tensor has 2 versions of each row"):
            engine.forward_backward(views, LABELS, contrast, whole_batch=True)
        engine.forward_backward(views, LABELS.repeat(2), LOSS)
    with ScatterOnceParallel(build(OfTwo), 2, devices(2)) as engine:
        engine.forward_backward((ROWS, ROWS + 1), LABELS, LOSS)


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [(ByBatch, {"x": ROWS}, ({"x": ROWS},)), (OfTwo, [ROWS, ROWS], (ROWS, ROWS))],
)
def test_misfit_inputs_name_what_fits(devices, make, wrong, right):
    with ScatterOnceParallel(build(make), 2, devices(2)) as engine:
        with pytest.raises(TypeError, match=r"does not take.*pass a tuple of"):
            engine.forward_backward(wrong, LABELS, LOSS)
        assert_step(engine, right, LABELS, LOSS)


def raises_in_forward(m, inputs):
    return m.linear(inputs, 1)


def test_inner_type_error_is_the_users(devices):
    model = Of(raises_in_forward, linear=linear())
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.raises(TypeError, match="positional argument") as raised,
    ):
        engine.forward_backward(ROWS, LABELS, LOSS)
    assert "does not take" not in str(raised.value)

    def criterion(output, targets):
        return len(output.mean())

    with (
        ScatterOnceParallel(linear(), 2, devices(2)) as engine,
        pytest.raises(TypeError, match="len"),
    ):
        engine.forward_backward(ROWS, LABELS, criterion)


def of_three(output, first, second):
    return LOSS(output, first) + LOSS(output, second)


def of_two_outputs(first, second, targets):
    return LOSS(first, targets) + LOSS(second, targets)


def of_one(output):
    return output.square().mean()


SPREAD = {
    "targets": (linear, of_three, (LABELS, LABELS), "criterion(output, *targets)"),
    "outputs": (
        lambda: Of(lambda m, x: (m.linear(x), m.linear(x)), linear=linear()),
        of_two_outputs,
        LABELS,
        "criterion(*output, targets)",
    ),
    "no targets": (linear, of_one, LABELS, "criterion(output)"),
}


@pytest.mark.parametrize("name", SPREAD)
def test_criterion_of_other_arguments(devices, name):
    """The error's remedy is followed."""
    make, criterion, targets, call_of_both = SPREAD[name]
    remedy = f"pass lambda output, targets: {call_of_both}"
    with ScatterOnceParallel(build(make), 2, devices(2)) as engine:
        with pytest.raises(TypeError, match=re.escape(remedy)):
            engine.forward_backward(ROWS, targets, criterion)
        code = remedy.removeprefix("pass ")
        of_both = eval(code, {"criterion": criterion})
        assert_step(engine, ROWS, targets, of_both)


@pytest.mark.parametrize(
    "criterion",
    [nn.MSELoss(), lambda o, t: nn.functional.cross_entropy(o, t), lambda o, t: o - t],
    ids=["torch", "function", "operator"],
)
def test_forgotten_targets_are_named_first(devices, criterion):
    with (
        ScatterOnceParallel(linear(), 2, devices(2)) as engine,
        pytest.raises((TypeError, AttributeError)) as raised,
    ):
        engine.forward_backward(ROWS, criterion=criterion)
    first, *_ = raised.value.__notes__
    assert first.startswith("no targets were passed")


def test_cross_entropy_without_targets(devices):
    with (
        ScatterOnceParallel(linear(), 2, devices(2)) as engine,
        pytest.raises(TypeError, match="needs targets, and none were passed"),
    ):
        engine.forward_backward(ROWS, criterion=LOSS)


def test_penalty_on_weights(devices):
    """The error's remedy is followed."""
    model = build(linear)
    expected = LOSS(model(ROWS), LABELS) + model.weight.square().sum()
    (expected_gradient,) = torch.autograd.grad(expected, [model.weight])

    def with_penalty(output, labels):
        return nn.functional.cross_entropy(output, labels) + model.weight.square().sum()

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(ValueError, match=r"engine\.loss\(…\) \+ penalty"):
            engine.forward_backward(ROWS, LABELS, with_penalty)
        loss = engine.loss(ROWS, LABELS, LOSS) + model.weight.square().sum()
        loss.backward()
    torch.testing.assert_close(model.weight.grad, expected_gradient)


def test_enable_grad_trains_under_no_grad(devices):
    model = Of(torch.enable_grad()(lambda m, x: m.linear(x)), linear=linear())
    engine = ScatterOnceParallel(model, 2, devices(2))
    criterion = torch.enable_grad()(lambda output, targets: LOSS(output, targets))
    with engine, torch.no_grad():
        engine.forward_backward(ROWS, LABELS, criterion)
    assert model.linear.weight.grad is not None


# --- notes ---

VALUES = randn(9, CLASSES, seed=1)
WEIGHTS = randn(9, seed=2)


@pytest.fixture
def engine(devices):
    with ScatterOnceParallel(linear(), 2, devices(2)) as engine:
        yield engine


def squares(output, targets, weights):
    return ((output - targets).square().sum(1) * weights).mean()


class Weighted(nn.Module):
    """A criterion that keeps the weights of the batch."""

    def __init__(self):
        super().__init__()
        self.options = {"weights": WEIGHTS}

    def forward(self, output, targets):
        return squares(output, targets, self.options["weights"])


def closing_over():
    own_weights = WEIGHTS.clone()
    return lambda output, targets: squares(output, targets, own_weights)


WHOLE = {
    "own_weights": closing_over(),
    "WEIGHTS": lambda output, targets: squares(output, targets, WEIGHTS),
    "weights": partial(squares, weights=WEIGHTS),
    "options['weights']": Weighted(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_tensor_of_whole_batch_is_named(engine, name):
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        engine.forward_backward(ROWS, VALUES, WHOLE[name])
    note = raised.value.__notes__[-1]
    assert note.startswith(f"the criterion refers to {name} with 9 entries")
    loss = engine.forward_backward(ROWS, (VALUES, WEIGHTS), lambda o, t: squares(o, *t))
    assert torch.isclose(loss, squares(engine.module(ROWS), VALUES, WEIGHTS))


def test_other_errors_have_no_such_note(engine):
    def failing(output, targets):
        raise RuntimeError(f"code 5 of {len(WEIGHTS) + 1}")

    with pytest.raises(RuntimeError, match="code 5") as raised:
        engine.forward_backward(ROWS, VALUES, failing)
    assert not any("refers to" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("kind", [list, tuple])
def test_batch_in_one_value_is_explained(engine, kind):
    with pytest.raises(TypeError) as raised:
        engine.forward_backward(
            kind([ROWS, VALUES]), criterion=lambda output, _: output.sum()
        )
    assert any(
        "passed as forward_backward(inputs, targets, criterion)" in note
        for note in raised.value.__notes__
    )
