"""A published example of gradient accumulation that equals DistributedDataParallel.

``Linear(8, 1)`` without bias starts from ones and is trained on the sum of its outputs: two
updates of SGD on the same eight rows, whose gradient is averaged over two halves. Halves
may be two micro-batches, two replicas, or two processes.
"""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import seeded
from torch import nn

from scatterpar import ScatterOnceParallel

PUBLISHED = [0.9472, 0.9440, 0.9527, 0.9687, 0.9570, 0.9343, 0.9411, 0.9186]


def example():
    with seeded():
        data = torch.rand(8, 8)
        model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


def rounded(model):
    return [round(value, 4) for value in model.weight[0].tolist()]


def summed(output, targets):
    return output.sum()


@pytest.mark.parametrize(("replicas", "accum"), [(2, 1), (1, 2)])
def test_the_engine(devices, replicas, accum):
    """Summed in each half, and averaged over the halves, which are equally large: a mean.

    It is not the gradient of all rows' sum, which the engine would say: the example is so.
    """
    model, optimizer, data = example()
    with ScatterOnceParallel(model, accum, devices(replicas), verify=False) as engine:
        for _ in range(2):
            optimizer.zero_grad()
            engine.forward_backward(data, None, summed)
            optimizer.step()
    assert rounded(model) == PUBLISHED


def test_the_engine_with_the_true_sum_of_all_rows(devices):
    """``reduction="sum"`` says that it is a sum; half of it is the published gradient."""
    model, optimizer, data = example()
    with ScatterOnceParallel(model, 4, devices(2)) as engine:
        for _ in range(2):
            optimizer.zero_grad()
            engine.forward_backward(data, None, lambda o, _: o.sum() / 2, reduction="sum")
            optimizer.step()
    assert rounded(model) == PUBLISHED
