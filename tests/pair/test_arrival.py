"""The pair's gradients as they arrive: hooks, strides, functions that share or give none."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import assert_close, assert_gradients, build, gradients, randint, randn
from torch import nn

from pair.common import Pair, plain

BATCH = randn(12, FEATURES), randint(CLASSES, 12)
VIRTUAL = [f"cpu:{i}" for i in range(4)]


def deep():
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def test_a_hook_on_the_node_of_a_parameter_sees_its_gradient():
    """Other libraries put them there; nothing tells but that the node is kept."""
    model = build(deep)
    weight = model[0][0].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    seen = []
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    pair = Pair(model, nn.CrossEntropyLoss(), VIRTUAL)
    _, expected = plain(model, *BATCH, nn.CrossEntropyLoss())
    seen.clear()
    pair.loss(*BATCH).backward()
    assert_close(seen[0], expected["0.0.weight"], "what the hook saw")
    assert len(seen) == 1
    assert_gradients(model, expected)


def test_a_penalty_on_the_parameters_beside_the_loss(placed):
    model = build(deep)
    twin = copy.deepcopy(model)

    def penalty(module):
        return sum((p**2).sum() for p in module.parameters())

    (nn.CrossEntropyLoss()(twin(BATCH[0]), BATCH[1]) + penalty(twin)).backward()
    pair = Pair(model, nn.CrossEntropyLoss(), placed(4))
    (pair.loss(*BATCH) + penalty(model)).backward()
    assert_gradients(model, gradients(twin))


def test_some_leaves_alone(placed):
    """``backward(inputs=…)``: the others keep what they had."""
    model = build(deep)
    _, expected = plain(model, *BATCH, nn.CrossEntropyLoss())
    chosen = [model[0][0].weight, model[5].bias]
    Pair(model, nn.CrossEntropyLoss(), placed(4)).loss(*BATCH).backward(inputs=chosen)
    for name, parameter in model.named_parameters():
        if any(parameter is one for one in chosen):
            assert_close(parameter.grad, expected[name], name)
        else:
            assert parameter.grad is None


def test_a_backward_that_fails_leaves_gradients_alone_and_the_next_one_works():
    model = build(deep)
    pair = Pair(model, nn.CrossEntropyLoss(), VIRTUAL)
    fails = [True]

    def hook(gradient):
        if fails:
            raise KeyError("mine")

    outputs = pair.model(BATCH[0])
    outputs[2].register_hook(hook)
    loss = pair.criterion(outputs, BATCH[1])
    with pytest.raises(KeyError, match="mine"):
        loss.backward(retain_graph=True)
    assert all(p.grad is None for p in model.parameters())
    fails.clear()
    _, expected = plain(model, *BATCH, nn.CrossEntropyLoss())
    pair.loss(*BATCH).backward()
    assert_gradients(model, expected)
