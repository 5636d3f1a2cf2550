"""Weights that forward hooks compute are those of plain torch, also for what reads them
between steps.
"""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_close, randint, randn
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from scatterpar import ScatterOnceParallel

INPUTS = randn(4, 12, FEATURES)
LABELS = randint(CLASSES, 4, 12)


def pruned(net):
    prune.l1_unstructured(net[0], "weight", amount=0.2)


def pruned_twice(net):
    pruned(net)
    prune.ln_structured(net[0], "weight", amount=0.2, n=2, dim=0)


def normed(net):
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(net[0])


def parametrised(net):
    torch.nn.utils.parametrizations.weight_norm(net[0])


KINDS = {"pruned": pruned, "pruned twice": pruned_twice, "normed": normed}
KINDS["parametrised"] = parametrised


def prune_by_weights(net):
    """A mask of the smallest entries of what ``weight`` is now."""
    weight = net[0].weight.detach()
    prune.custom_from_mask(net[2], "weight", net[2].weight.abs() > weight.abs().mean())


def trained(kind, step, net):
    """The weights that are read after each step, and a network pruned by them."""
    KINDS[kind](net)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    weights = []
    for inputs, labels in zip(INPUTS, LABELS, strict=True):
        optimizer.zero_grad()
        step(inputs, labels)
        optimizer.step()
        weights.append(net[0].weight.detach().clone())
    prune_by_weights(net)
    return [*weights, net[0].weight, net[2].weight]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_between_steps_as_plain_torch(kind, devices):
    plain, net = mlp(), mlp()
    expected = trained(
        kind, lambda x, y: F.cross_entropy(plain(x), y).backward(), plain
    )
    with ScatterOnceParallel(net, 2, devices(3)) as engine:
        actual = trained(
            kind,
            lambda x, y: engine.forward_backward(x, y, nn.CrossEntropyLoss()),
            net,
        )
        assert engine._replicas.of_model.builds == 1
    for number, (weight, of_plain) in enumerate(zip(actual, expected, strict=True)):
        assert_close(weight, of_plain, f"weight {number}")


def test_inference_sets_the_weight():
    net = mlp().eval()
    pruned(net)
    with torch.no_grad():
        net[0].weight_orig.mul_(2)
    with ScatterOnceParallel(net, 1, ["cpu", "cpu:1"]) as engine:
        engine(INPUTS[0])
    assert_close(net[0].weight, net[0].weight_orig * net[0].weight_mask, "weight")


def test_memory_shared_with_weight_unchanged():
    """Lightning's ``ModelPruning`` restores weights so. Its copies were overwritten."""
    net = mlp()
    original = net[0].weight.detach().clone()
    pruned(net)
    copy = original.clone()
    net[0].weight.data = copy
    with ScatterOnceParallel(net, 1, ["cpu", "cpu:1"]) as engine:
        engine.forward_backward(INPUTS[0], LABELS[0], nn.CrossEntropyLoss())
    assert torch.equal(copy, original)
    assert_close(net[0].weight, original * net[0].weight_mask, "weight")
