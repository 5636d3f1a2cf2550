"""Ranks whose gradients come in several dtypes."""

from __future__ import annotations

import copy

import torch
from helpers.gang import Counted, gang
from helpers.models import CLASSES, FEATURES
from helpers.oracle import randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

CRITERION = nn.CrossEntropyLoss()
ROWS = (9, 4)


def data():
    return randn(sum(ROWS), FEATURES), randint(CLASSES, sum(ROWS))


class Halves(nn.Module):
    """A layer of each of three dtypes, one after the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(FEATURES, FEATURES).to(dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)
        )

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows.to(layer.weight.dtype))
        return rows


def halves(group):
    torch.manual_seed(group.rank())
    module = Halves()
    mine = [tensor.float().split(ROWS)[group.rank()] for tensor in data()]
    twin = None
    with ScatterOnceParallel(module, process_group=group) as engine:
        twin = copy.deepcopy(module)
        with Counted() as collectives:
            engine.forward_backward(mine[0], mine[1].long(), CRITERION)
    inputs, targets = data()
    CRITERION(twin(inputs.float()), targets).backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype == ours.dtype
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=3e-2, atol=3e-3)
    return [p.grad for p in module.parameters()], [str(dtype) for _, dtype, _ in collectives]


def test_half_and_bfloat16_gradients_keep_their_dtype():
    (first, dtypes), (second, _) = gang()(2, halves)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert dtypes == [f"torch.{name}" for name in ("float64", "float16", "bfloat16", "float32")]
