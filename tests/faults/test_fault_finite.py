"""``check_finite=True``: a loss that is NaN or infinite is refused before anything
changes.
"""

from __future__ import annotations

import math

import pytest
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_step, randint, randn
from torch import nn

from faults.state import nothing_changes
from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

INPUTS, LABELS = randn(18, FEATURES), randint(CLASSES, 18)


def poisoned(replica, number, value):
    """Of nine micro-batches of two rows, one is not finite."""
    inputs = INPUTS.clone()
    inputs[6 * replica + 2 * number] = value
    return inputs, LABELS


def criterion(output, targets):
    return nn.functional.cross_entropy(output, targets) + output.sum() * 0


@pytest.mark.contract
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("replica", "number"), [(0, 0), (2, 1)])
def test_non_finite_loss_named_no_change(devices, replica, number, value):
    model, ids = mlp(), devices(3)
    with ScatterOnceParallel(model, 3, ids, check_finite=True) as engine:
        engine.forward_backward(INPUTS, LABELS, criterion)
        with nothing_changes(model), pytest.raises(FloatingPointError) as caught:
            engine.forward_backward(*poisoned(replica, number, value), criterion)
        message = str(caught.value)
        assert f"in replica {replica} on {ids[replica]}, sub-step {number}" in message
        assert "the loss is nan" in message or "the loss is inf" in message
        assert "nothing was changed" in message
        assert_step(engine, INPUTS, LABELS, criterion)


def test_nan_passes_through_by_default():
    model = mlp()
    with ScatterOnceParallel(model, 3, ["cpu"] * 3) as engine:
        assert math.isnan(engine.forward_backward(*poisoned(1, 1, math.nan), criterion))
        assert model[0].weight.grad.isnan().any()
