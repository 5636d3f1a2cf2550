"""Rows of a micro-batch that broadcast, where plain torch refuses the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness.looks import FEATURES, step
from harness.oracle import build, randn
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

ROWS = 8  # of each micro-batch, and as many outputs per row
BATCH = 4 * ROWS
INPUTS = randn(BATCH, FEATURES)
MATRIX = randn(BATCH, ROWS)
VECTOR = randn(BATCH).abs()
REFUSED = r"for \d+ rows the shapes \(\d+, 8\) and \(\d+,\) do not broadcast"

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using a target size", "ignore:reduction"
)


def weighted_squares(output, targets):
    values, weights = targets
    return ((output - values).square() * weights).mean()


def weighted_in_place(output, targets):
    values, weights = targets
    return (output - values).square().mul_(weights).mean()


def weighted_entropy(output, targets):
    values, weights = targets
    return F.binary_cross_entropy_with_logits(
        output, values.sigmoid(), weight=weights, pos_weight=torch.ones(ROWS).double()
    )


def masked(output, targets):
    values, weights = targets
    return (output - values).masked_fill(weights > 0.5, 0).square().mean()


def selected(output, targets):
    values, weights = targets
    return torch.where((weights > 0.5).expand_as(output), output, values).mean()


def contracted(output, targets):
    return (output @ targets[1]).mean()


WRONG = {
    "mse": (nn.MSELoss(), VECTOR),
    "huber": (nn.HuberLoss(), VECTOR),
    "l1": (F.l1_loss, VECTOR),
    "smooth": (nn.SmoothL1Loss(), VECTOR),
    "divergence": (nn.KLDivLoss(), VECTOR),
    "difference": (lambda o, t: (o - t).square().mean(), VECTOR),
    "weights": (weighted_squares, (MATRIX, VECTOR)),
    "weights in place": (weighted_in_place, (MATRIX, VECTOR)),
    "weights of an entropy": (weighted_entropy, (MATRIX, VECTOR)),
    "a mask": (masked, (MATRIX, VECTOR)),
    "a product": (contracted, (MATRIX, VECTOR)),
}


def network(columns=ROWS):
    return build(lambda: nn.Linear(FEATURES, columns))


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_broadcast_are_refused(devices, name):
    criterion, targets = WRONG[name]
    module = network()
    with pytest.raises(RuntimeError):  # plain torch
        criterion(module(INPUTS), targets)
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        for call in (step, lambda engine, *args: engine.loss(INPUTS, args[1], args[0])):
            with pytest.raises(ValueError, match=REFUSED):
                call(engine, criterion, targets, INPUTS)
        assert all(parameter.grad is None for parameter in module.parameters())


def test_expanded_mask_is_refused():
    """``expand_as`` fails, which says nothing of the other tensor's rows in its name."""
    refusal = pytest.raises(ValueError, match=r"the shapes \(16,\) and \(16, 8\)")
    with ScatterOnceParallel(network(), 4, ["cpu"]) as engine, refusal:
        step(engine, selected, (MATRIX, VECTOR), INPUTS)


@pytest.mark.parametrize("rows", [4, 64])
def test_rows_of_the_pair_that_broadcast_are_refused(devices, rows):
    module = network(rows)
    inputs, targets = randn(2 * rows, FEATURES), randn(2 * rows)
    outputs = DataParallelModel(module, devices(2))(inputs)
    criterion = DataParallelCriterion(nn.MSELoss(), devices(2))
    with pytest.raises(
        ValueError, match=rf"\({2 * rows}, {rows}\) and \({2 * rows},\)"
    ):
        criterion(outputs, targets)


def test_single_rows_that_broadcast_are_refused():
    """One row broadcasts with one entry, however many columns it has."""
    refusal = pytest.raises(ValueError, match=r"\(3, 5\) and \(3,\) do not broadcast")
    with ScatterOnceParallel(network(5), 6, ["cpu"]) as engine, refusal:
        step(engine, nn.MSELoss(), VECTOR[:6], INPUTS[:6])


# --- what is right, or no answer ---


def only_eight_rows(output, targets):
    if len(output) != ROWS:
        raise RuntimeError("The size of tensor a must match the size of tensor b")
    return F.mse_loss(output, targets)


def constant_per_row(output, targets):
    """Weights of a micro-batch: they do not grow with the rows."""
    return ((output - targets).square() * torch.linspace(0, 1, ROWS)[:, None]).mean()


def viewed(output, targets):
    return (output.view(ROWS, ROWS) - targets).square().mean()


class FixedSize(nn.Module):
    """Takes eight rows, no more."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, ROWS)
        self.positions = nn.Parameter(torch.ones(ROWS, ROWS))

    def forward(self, rows):
        return self.linear(rows) + self.positions


@pytest.mark.parametrize(
    ("criterion", "module"),
    [
        (only_eight_rows, network),
        (constant_per_row, network),
        (viewed, network),
        (nn.MSELoss(), lambda: build(FixedSize)),
    ],
)
def test_fixed_number_of_rows_is_not_refused(devices, criterion, module):
    with ScatterOnceParallel(module(), 2, devices(2)) as engine:
        loss = step(engine, criterion, MATRIX, INPUTS)
    assert loss.isfinite()


def test_fixed_number_of_rows_in_the_pair(devices):
    outputs = DataParallelModel(network(), devices(2))(INPUTS[: 2 * ROWS])
    criterion = DataParallelCriterion(only_eight_rows, devices(2))
    assert criterion(outputs, MATRIX[: 2 * ROWS]).isfinite()


def test_as_many_columns_as_rows_are_right(devices):
    def right(output, targets):
        values, weights = targets
        return ((output - values).square() * weights[:, None]).mean()

    with warnings.catch_warnings(action="error"):
        with ScatterOnceParallel(network(), 2, devices(2)) as engine:
            for _ in range(8):
                step(engine, right, (MATRIX, VECTOR), INPUTS)
        outputs = DataParallelModel(network(), devices(2))(INPUTS)
        DataParallelCriterion(right, devices(2))(outputs, (MATRIX, VECTOR))


def test_out_of_memory_is_no_answer():
    """The outputs of two micro-batches may not fit where those of one do."""

    def fits_once(output, targets):
        if len(output) != ROWS:
            raise torch.OutOfMemoryError("out of memory")
        return F.mse_loss(output, targets)

    with ScatterOnceParallel(network(), 2, ["cpu"] * 2) as engine:
        assert step(engine, fits_once, MATRIX, INPUTS).isfinite()


def test_criterion_is_undone():
    """It is called with rows of two micro-batches, and none of that stays."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output, targets):
            self.calls += 1
            return F.mse_loss(output, targets)

    criterion = Counts()
    state = torch.get_rng_state()
    refusal = pytest.raises(ValueError, match=REFUSED)
    with ScatterOnceParallel(network(), 4, ["cpu"]) as engine, refusal:
        step(engine, criterion, VECTOR, INPUTS)
    assert criterion.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
