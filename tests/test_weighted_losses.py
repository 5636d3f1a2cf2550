"""Losses that average over something else than rows, beside plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp, token_classifier
from helpers.oracle import assert_step, build, randint, randn
from helpers.weighted import CASES, classes, probabilities, values
from pair.common import assert_pair
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

MIXED = ["cpu:0", "cpu:1", "cpu:0", "cpu:2"]  # one replica shares the master's memory


def step(runner, device_ids, model, batch, criterion, **options):
    """One step gives the loss and the gradients of the whole batch."""
    if runner == "pair":
        return assert_pair(model, *batch, criterion, device_ids, **options)
    with ScatterOnceParallel(model, 3, device_ids) as engine:
        return assert_step(engine, *batch, criterion, **options)


by_both = pytest.mark.parametrize("runner", ["engine", "pair"])


class Method:
    def squared(self, output, targets):
        return F.mse_loss(output, targets)


FUNCTIONS = {
    "function of torch": (F.cross_entropy, classes),
    "function": (lambda output, targets: ((output - targets) ** 2).sum(1).mean(), probabilities),
    "bound method": (Method().squared, values),
    "method of a module": (nn.MSELoss().forward, values),
    "partial": (partial(F.smooth_l1_loss, beta=0.5), values),
    "no weight for a class": (
        nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0, 0.5]).double()),
        lambda rows: torch.tensor([0, 0, 0, 1, 2, 3]).repeat(rows)[-rows:],
    ),
}
LOSSES = FUNCTIONS | {name: (case.criterion(), case.targets) for name, case in CASES.items()}


@by_both
@pytest.mark.parametrize("name", LOSSES)
def test_whole_batch_oracle(name, runner):
    criterion, targets = LOSSES[name]
    for rows in (37, 3):  # ragged, and fewer than replicas
        step(runner, MIXED, mlp(), (randn(rows, FEATURES), targets(rows)), criterion)


@by_both
@pytest.mark.parametrize(
    "case", ["mean", "padded", "class weights", "sum", "smoothing, class weights"]
)
def test_rows_of_many_terms(case, runner):
    """Targets of shape (rows, length): a row holds several terms, or padding in their place."""
    rows, length = 11, 6
    targets = CASES[case].targets(rows * length).view(rows, length)
    batch = randint(11, rows, length, seed=5), targets
    step(runner, MIXED, token_classifier(), batch, CASES[case].criterion())


@by_both
def test_probabilities_for_every_position(runner):
    batch = randint(11, 7, 3), randn(7, CLASSES, 3).softmax(1)
    step(runner, MIXED, token_classifier(), batch, nn.CrossEntropyLoss())


def masked_mean(output, targets):
    """A mean over real tokens, in a plain function that nobody can look into."""
    losses = F.cross_entropy(output, targets["ids"], reduction="none")
    return (losses * targets["mask"]).sum() / targets["mask"].sum()


def test_count_says_what_a_function_averages_over(devices):
    rows, length = 13, 6
    ids = randint(11, rows, length)
    lengths = randint(length, rows, seed=9) + 1
    mask = (torch.arange(length) < lengths[:, None]).double()
    targets = {"ids": randint(CLASSES, rows, length, seed=3), "mask": mask}
    options = {"count": lambda _, targets: targets["mask"].sum()}
    with ScatterOnceParallel(token_classifier(), 3, devices(3)) as engine:
        assert_step(engine, ids, targets, masked_mean, **options)
    # Without it rows are counted, which is another number: the test has teeth.
    with (
        ScatterOnceParallel(token_classifier(), 3, devices(3), verify=False) as engine,
        pytest.raises(AssertionError, match="loss: off by"),
    ):
        assert_step(engine, ids, targets, masked_mean)


def test_count_may_look_at_inputs_and_return_a_number(devices):
    seen = []

    def count(inputs, targets):
        seen.append((len(inputs), targets))
        return int((inputs[:, 0] > 0).sum())

    class PositiveMean(nn.Module):
        def forward(self, output, targets):
            return (output[:, 0] * output[:, 1]).sum() / output[:, 1].sum()

    class FlagsRows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, 1)

        def forward(self, inputs):
            return torch.cat([self.linear(inputs), (inputs[:, :1] > 0).double()], 1)

    inputs = randn(12, FEATURES)
    inputs[:, 0] = inputs[:, 0].abs()
    inputs[::3, 0] *= -1
    with ScatterOnceParallel(build(FlagsRows), 2, devices(2)) as engine:
        assert_step(engine, inputs, None, PositiveMean(), count=count)
    assert seen == [(3, None)] * 4


def summed(output, targets):
    return (output - targets).pow(2).sum()


class Summed(nn.Module):
    reduction = "mean"

    def forward(self, output, targets):
        return summed(output, targets)


@by_both
@pytest.mark.parametrize("criterion", [summed, Summed()], ids=["of a function", "wins"])
def test_reduction_given(criterion, runner):
    for rows in (9, 3):
        batch = randn(rows, FEATURES), randn(rows, CLASSES)
        step(runner, MIXED, mlp(), batch, criterion, reduction="sum")


def test_micro_batches_without_terms_add_nothing(devices):
    """Cross entropy of padding alone is 0 / 0: such a micro-batch must not poison the step."""
    targets = torch.full((12,), -100)
    targets[5], targets[11] = 1, 3
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        loss = assert_step(engine, randn(12, FEATURES), targets, nn.CrossEntropyLoss())
    assert torch.isfinite(loss)


def test_micro_batches_without_terms_still_run_forward(devices):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    targets = torch.full((12,), -100)
    targets[0] = 1
    with ScatterOnceParallel(model, 3, devices(1)) as engine:
        engine.forward_backward(randn(12, FEATURES), targets, nn.CrossEntropyLoss())
    assert model[0].num_batches_tracked == 3


def test_a_batch_without_terms_moves_nothing_and_is_never_nan(devices):
    model = mlp()
    targets = torch.full((8,), -100)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.forward_backward(randn(8, FEATURES), targets, nn.CrossEntropyLoss())
    assert loss == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name
