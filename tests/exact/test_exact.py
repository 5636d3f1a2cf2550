"""A step gives the gradient, the loss and the training of the whole batch on one
device.
"""

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_parameters,
    gradients,
    randint,
    randn,
)
from harness.pairwise import pairwise
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core


@pytest.mark.contract
@pairwise(
    quick={"rows": [37, 9, 1]},
    replicas=[1, 2, 4],
    accum=[1, 3, 16],
    rows=[64, 37, 9, 3, 1],
)
def test_training_equals_one_device(devices, replicas, accum, rows):
    """A batch may change its size from step to step."""
    model = mlp()
    plain = copy.deepcopy(model)
    criterion = nn.CrossEntropyLoss()
    ours, theirs = (
        torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain)
    )
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        for step, size in enumerate((rows, rows, 64, 1, rows)):
            inputs, targets = (
                randn(size, FEATURES, seed=step),
                randint(CLASSES, size, seed=step),
            )
            ours.zero_grad()
            theirs.zero_grad()
            loss = engine.forward_backward(inputs, targets, criterion)
            expected = criterion(plain(inputs), targets)
            expected.backward()
            assert_close(loss, expected.detach(), f"loss of step {step}")
            assert_gradients(model, gradients(plain))
            ours.step()
            theirs.step()
            assert_parameters(model, plain)


@pytest.mark.contract
def test_grad_tensors_added_to_in_place(devices):
    """Optimizers and flat-gradient tricks hold on to ``.grad``: it is added to, not
    replaced.
    """
    model = mlp()
    batch = randn(6, FEATURES), randint(CLASSES, 6), nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*batch)
        held, once = [p.grad for p in model.parameters()], gradients(model)
        engine.forward_backward(*batch)
        assert_gradients(model, {name: 2 * gradient for name, gradient in once.items()})
        assert all(
            p.grad is mine for p, mine in zip(model.parameters(), held, strict=True)
        )
        copies = [gradient.clone() for gradient in held]
        model.zero_grad()
        engine.forward_backward(
            randn(9, FEATURES), randint(CLASSES, 9), nn.CrossEntropyLoss()
        )
    assert all(map(torch.equal, held, copies)), (
        "a gradient handed out is not written any more"
    )
