"""Whether a backward pass calls modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar.verify.backward_calls import BackwardCalls

pytestmark = [pytest.mark.core, pytest.mark.draws]


def plain(layer, rows):
    return layer(rows)


def checkpointed(layer, rows):
    return checkpoint(layer, rows, use_reentrant=False)


def with_tensor_hook(layer, rows):
    output = rows * layer.weight.sum()
    output.register_hook(lambda gradient: gradient + layer(gradient).detach() * 0)
    return output


@pytest.mark.parametrize(
    ("function", "calls_modules"),
    [(plain, False), (checkpointed, True), (with_tensor_hook, True)],
)
def test_modules_that_backward_calls(function, calls_modules):
    layer = nn.Linear(2, 2)
    calls = BackwardCalls()
    loss = function(layer, torch.ones(3, 2)).sum()
    assert not calls.calls_modules
    with calls:
        loss.backward()
    assert calls.calls_modules is calls_modules


def test_calls_after_the_body_do_not_count():
    calls = BackwardCalls()
    with calls:
        torch.ones(2, requires_grad=True).sum().backward()
    nn.Linear(2, 2)(torch.ones(3, 2))
    assert not calls.calls_modules
