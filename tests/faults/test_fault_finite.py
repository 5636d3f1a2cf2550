"""``check_finite=True``: a loss that is NaN or infinite is refused before anything changes."""

from __future__ import annotations

import math

import pytest
import torch
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import randint, randn
from torch import nn

from faults.state import nothing_changes
from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

REPLICAS, ACCUM, EACH = 3, 3, 2


def poisoned(replica, number, value):
    inputs = randn(REPLICAS * ACCUM * EACH, FEATURES)
    row = (replica * ACCUM + number) * EACH
    inputs[row] = value
    return inputs, randint(CLASSES, len(inputs))


def criterion(output, targets):
    return nn.functional.cross_entropy(output, targets) + output.sum() * 0


@pytest.mark.contract
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("replica", [0, 2])
def test_names_replica_and_sub_step_and_changes_nothing(devices, replica, number, value):
    model, ids = mlp(), devices(REPLICAS)
    with ScatterOnceParallel(model, ACCUM, ids, check_finite=True) as engine:
        clean = (randn(18, FEATURES), randint(CLASSES, 18))
        engine.forward_backward(*clean, criterion)
        with nothing_changes(model), pytest.raises(FloatingPointError) as caught:
            engine.forward_backward(*poisoned(replica, number, value), criterion)
        message = str(caught.value)
        assert f"in replica {replica} on {ids[replica]}, sub-step {number}" in message
        assert "the loss is nan" in message or "the loss is inf" in message
        assert "nothing was changed" in message
        gradient = model[0].weight.grad.clone()
        engine.forward_backward(*clean, criterion)
        assert torch.equal(model[0].weight.grad, gradient * 2)


def test_by_default_it_passes_through_as_in_torch():
    model = mlp()
    with ScatterOnceParallel(model, ACCUM, ["cpu"] * REPLICAS) as engine:
        assert math.isnan(engine.forward_backward(*poisoned(1, 1, math.nan), criterion))
        assert model[0].weight.grad.isnan().any()
