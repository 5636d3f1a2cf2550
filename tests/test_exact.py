"""A step gives the gradient, the loss and the training of the whole batch on one device."""

from __future__ import annotations

import copy

import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    gradients,
    randint,
    randn,
    whole_batch,
)
from helpers.pairwise import pairwise
from torch import nn

from scatterpar import ScatterOnceParallel

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
STEPS = 5


@pairwise(replicas=[1, 2, 4], accum=[1, 3, 16], rows=[64, 37, 9, 3, 1], optimizer=OPTIMIZERS)
def test_training_is_that_of_one_device(devices, replicas, accum, rows, optimizer):
    model = mlp()
    plain = copy.deepcopy(model)
    criterion = nn.CrossEntropyLoss()
    ours = OPTIMIZERS[optimizer](model.parameters())
    theirs = OPTIMIZERS[optimizer](plain.parameters())
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        for step in range(STEPS):
            inputs, targets = randn(rows, FEATURES, seed=step), randint(CLASSES, rows, seed=step)
            ours.zero_grad()
            theirs.zero_grad()
            loss = engine.forward_backward(inputs, targets, criterion)
            expected = criterion(plain(inputs), targets)
            expected.backward()
            assert_close(loss, expected.detach(), f"loss of step {step}")
            assert_gradients(model, gradients(plain))
            ours.step()
            theirs.step()
            for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_close(mine.detach(), its.detach(), f"{name} after step {step}")


def test_a_batch_may_change_its_size_from_step_to_step(devices):
    with ScatterOnceParallel(mlp(), 3, devices(4)) as engine:
        for rows in (64, 1, 9, 37, 2, 64):
            inputs, targets = randn(rows, FEATURES, seed=rows), randint(CLASSES, rows, seed=rows)
            assert_step(engine, inputs, targets, nn.CrossEntropyLoss())


def test_grad_tensors_are_kept_and_added_to_in_place(devices):
    """Optimizers and flat-gradient tricks hold on to ``.grad``: it is added to, not replaced."""
    model = mlp()
    held = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        held[name] = parameter.grad
    batch = randn(6, FEATURES), randint(CLASSES, 6)
    _, expected = whole_batch(model, *batch, nn.CrossEntropyLoss())
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
    for name, parameter in model.named_parameters():
        assert parameter.grad is held[name]
        assert_close(parameter.grad, expected[name] + 1, name)


def test_a_gradient_handed_out_is_not_written_by_the_next_step(devices):
    model = mlp()
    batch = randn(6, FEATURES), randint(CLASSES, 6)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
        kept = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in kept]
        model.zero_grad()
        engine.forward_backward(randn(9, FEATURES), randint(CLASSES, 9), nn.CrossEntropyLoss())
    for gradient, before in zip(kept, copies, strict=True):
        assert torch.equal(gradient, before)
