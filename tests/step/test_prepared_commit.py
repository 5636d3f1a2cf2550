"""What the commit needs to know is asked before the host waits for devices."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.step import reduce
from scatterpar.step.prepared_commit import may_become_grads

pytestmark = pytest.mark.draws


def leaf():
    return nn.Parameter(torch.zeros(2, 3))


class OfUser(torch.Tensor):
    """A subclass, which autograd's own copy of a gradient would be."""


GRADIENTS = {
    "whole": (torch.ones(2, 3), True),
    "a part": (torch.ones(4, 3)[:2], False),
    "other strides": (torch.ones(3, 2).t(), False),
    "another dtype": (torch.ones(2, 3, dtype=torch.float64), False),
    "sparse": (torch.ones(2, 3).to_sparse(), False),
    "a subclass": (torch.ones(2, 3).as_subclass(OfUser), False),
    "none": (None, True),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_assigned_if_taken_over(name):
    gradient, expected = GRADIENTS[name]
    pairs = [(leaf(), torch.ones(2, 3)), (leaf(), gradient)]
    assert may_become_grads(pairs) is expected


@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]], ids=len)
def test_commit_is_prepared_before_losses_are_read(layout, monkeypatch):
    order = []
    read = reduce.total_of

    class Recorded(reduce.BufferWriter):
        def __init__(self, *arguments):
            order.append("prepared")
            super().__init__(*arguments)

    def total_of(losses):
        order.append("read")
        return read(losses)

    monkeypatch.setattr(reduce, "total_of", total_of)
    monkeypatch.setattr(reduce, "BufferWriter", Recorded)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    engine = ScatterOnceParallel(model, 2, layout, verify=False)
    engine.forward_backward(randn(12, 3), randn(12, 4), nn.MSELoss())
    assert order == ["prepared", "read"]
