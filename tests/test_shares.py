"""Shares of different sizes, given; for any shares: ``test_properties.py``."""

from __future__ import annotations

import math

import pytest
import torch
from harness.oracle import assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.plan import make_plan

pytestmark = pytest.mark.draws

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shares", "accum", "substeps"),
    [
        ([0.3, 0.7], 5, [3, 7]),
        ([0.1, 0.5], 6, [2, 10]),
        ([1 / 7, 6 / 7], 7, [2, 12]),
        ([1e-12, 1], 2, [1, 4]),
    ],
    ids=str,
)
def test_rounding_of_the_given_numbers_makes_no_sub_step_more(shares, accum, substeps):
    """A float's 0.3 of 0.3 + 0.7 is more than three tenths: ten times that was cut into four."""
    plan = make_plan(1000, [CPU] * 2, accum, shares=shares)
    assert [len(share.micro_batches) for share in plan.shares] == substeps
    largest = max(b - a for share in plan.shares for a, b in share.micro_batches)
    assert largest <= math.ceil(1000 / (2 * accum))


@pytest.mark.parametrize("rows", [1, 3, 9, 4096])
def test_equal_shares_are_the_plan_without_any(rows):
    assert make_plan(rows, [CPU] * 4, 5, shares=[2.5] * 4) == make_plan(rows, [CPU] * 4, 5)


def test_the_micro_batch_size_holds_for_every_share():
    plan = make_plan(100, [CPU] * 2, micro_batch_size=8, shares=[3, 1])
    assert [share.rows for share in plan.shares] == [75, 25]
    assert [len(share.micro_batches) for share in plan.shares] == [10, 4]


@pytest.mark.contract
@pytest.mark.parametrize("device_ids", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]], ids=str)
@pytest.mark.parametrize("rows", [2, 7, 37])
def test_the_gradient_is_exact(device_ids, rows):
    model = build(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    inputs, targets = randn(rows, 6), randint(3, rows)
    with ScatterOnceParallel(model, accum=3, device_ids=device_ids, shares=[5, 1, 2]) as engine:
        assert_step(engine, inputs, targets, nn.CrossEntropyLoss())
        assert engine.shares == (5, 1, 2)
        assert engine.last_step.plan == engine.plan(rows)
        torch.testing.assert_close(engine.eval()(inputs), model(inputs))


def test_learned_shares_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"removed in 0\.3\.0; pass .* such as \[3, 1\]"):
        ScatterOnceParallel(nn.Linear(1, 1), device_ids=["cpu"] * 2, shares="auto")
