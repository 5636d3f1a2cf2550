"""When a replay differs from the sub-step itself.

``test_cuda_graphs.py`` has looks at replays.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
from harness.models import linear
from harness.oracle import randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.options import cuda_graphs

pytestmark = pytest.mark.core

LOSS = nn.MSELoss()


def times(factor, replay, task):
    """What a graph computes whose frozen number is another one."""
    loss = replay(task)
    for leaf in task.leaves:
        leaf.grad.mul_(factor)
    return loss.mul_(factor)


@pytest.mark.parametrize(
    ("factor", "inputs", "differs"),
    [
        (1 + 1e-3, 1.0, True),
        (1 + 1e-12, 1.0, False),
        (math.nan, 1.0, True),
        (2.0, math.nan, False),
    ],
    ids=["another number", "rounding", "not finite", "nothing to compare"],
)
def test_more_than_rounding_differs(monkeypatch, factor, inputs, differs):
    compare = cuda_graphs.difference_of_replay
    differences = []

    def compared(attempt, task, rows, replay):
        replay = partial(times, factor, replay)
        differences.append(compare(attempt, task, rows, replay))
        return 0.0

    monkeypatch.setattr(cuda_graphs, "difference_of_replay", compared)
    model = linear()
    batch = randn(4, model.in_features) * inputs, randn(4, model.out_features)
    with ScatterOnceParallel(model, device_ids=["cpu"], graphs=True) as engine:
        for _ in range(2):
            engine.forward_backward(*batch, LOSS)
    (difference,) = differences
    assert (difference > 0) == differs
