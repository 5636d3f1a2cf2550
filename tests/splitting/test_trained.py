"""Which leaves a step trains, and their names."""

from __future__ import annotations

import torch
from harness.oracle import seeded
from torch import nn

from scatterpar.splitting.trained import TrainedGradients, leaves_outside


def models():
    with seeded():
        return nn.Linear(2, 1), nn.Linear(1, 3)


def test_leaves_outside_of_model_are_named():
    model, head = models()
    state = {"scale": nn.Parameter(torch.ones(())), "frozen": torch.ones(2)}

    def step(model_of_step, batches):
        return head, state, model

    leaves = leaves_outside(model, step)
    assert set(leaves) == {
        "step.head.weight",
        "step.head.bias",
        "step.state['scale']",
    }


def test_leaf_of_no_optimizer_is_not_compared():
    model, head = models()
    outside = {"step.head.weight": head.weight}
    gradients = TrainedGradients(model, outside)
    before = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    with gradients:
        head(model(torch.ones(1, 2))).sum().backward()
    assert set(gradients.result(before)) == {"weight", "bias", "step.head.weight"}
    unnamed = "a parameter of shape (3,) that step makes"
    assert gradients.uncompared() == [unnamed]
    gradients.receive(torch.optim.SGD(model.parameters(), 0.1))
    assert gradients.is_one_missing()
    assert set(gradients.result(before)) == {"weight", "bias"}
    assert sorted(gradients.uncompared()) == [unnamed, "step.head.weight"]
    gradients.receive(torch.optim.SGD(head.parameters(), 0.1))
    assert not gradients.is_one_missing()
    assert gradients.uncompared() == []
    names = {"weight", "bias", "step.head.weight", "step.SGD.0.1"}
    assert set(gradients.result(before)) == names
    assert torch.autograd.backward.__module__ == "torch.autograd"
