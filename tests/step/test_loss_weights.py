"""Losses that average over something else than rows, beside plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.models import CLASSES, FEATURES, mlp, token_classifier
from harness.oracle import assert_step, build, randint, randn
from harness.weighted import CASES, classes, probabilities, values
from pair.common import assert_pair
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

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


@pytest.mark.contract
@by_both
@pytest.mark.parametrize("name", LOSSES)
def test_whole_batch_oracle(name, runner):
    criterion, targets = LOSSES[name]
    for rows in (37, 3):  # ragged, and fewer than replicas
        step(runner, MIXED, mlp(), (randn(rows, FEATURES), targets(rows)), criterion)


@by_both
@pytest.mark.parametrize(
    "case", ["mean", "padded", "class weights", "sum", "smoothing, class weights", "probabilities"]
)
def test_rows_of_many_terms(case, runner):
    """Targets of shape (rows, length): a row holds several terms, or padding in their place."""
    rows, length = 11, 6
    targets = CASES[case].targets(rows * length).unflatten(0, (rows, length))
    if case == "probabilities":
        targets = targets.movedim(-1, 1)  # (rows, classes, length)
    batch = randint(11, rows, length, seed=5), targets
    step(runner, MIXED, token_classifier(), batch, CASES[case].criterion())


def masked_mean(output, targets):
    """A mean over real tokens, in a plain function that nobody can look into."""
    losses = F.cross_entropy(output, targets["ids"], reduction="none")
    return (losses * targets["mask"]).sum() / targets["mask"].sum()


@pytest.mark.contract
def test_count_says_what_a_function_averages_over(devices):
    rows, length = 13, 6
    ids = randint(11, rows, length)
    lengths = randint(length, rows, seed=9) + 1
    mask = (torch.arange(length) < lengths[:, None]).double()
    targets = {"ids": randint(CLASSES, rows, length, seed=3), "mask": mask}
    with ScatterOnceParallel(token_classifier(), 3, devices(3)) as engine:
        assert_step(engine, ids, targets, masked_mean, count=lambda _, t: t["mask"].sum())


def summed(output, targets):
    return (output - targets).pow(2).sum()


class Summed(nn.Module):
    reduction = "mean"

    def forward(self, output, targets):
        return summed(output, targets)


@pytest.mark.contract
@by_both
@pytest.mark.parametrize("criterion", [summed, Summed()], ids=["of a function", "wins"])
def test_reduction_given(criterion, runner):
    for rows in (9, 3):
        batch = randn(rows, FEATURES), randn(rows, CLASSES)
        step(runner, MIXED, mlp(), batch, criterion, reduction="sum")


@pytest.mark.contract
def test_micro_batches_without_terms_still_run_forward(devices):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    targets = torch.full((12,), -100)
    targets[0] = 1
    with ScatterOnceParallel(model, 3, devices(1)) as engine:
        engine.forward_backward(randn(12, FEATURES), targets, nn.CrossEntropyLoss())
    assert model[0].num_batches_tracked == 3
