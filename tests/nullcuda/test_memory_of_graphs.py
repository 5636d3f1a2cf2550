"""How much memory graphs take, by torch's own allocator.

The page of graphs says it in words (docs/cuda-graphs.md).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.nullcuda, pytest.mark.draws]

FEATURES, ROWS, LAYERS = 256, 8192, 12
# What a layer leaves for the backward pass: a multiple of the 2 MiB to which torch
# rounds allocations of this size.
LAYER = ROWS * FEATURES * 4
STEPS = 6  # the fifth captures


def most_reserved(graphs):
    """The most that torch takes of the card in steps of two sub-steps, in ``LAYER``."""
    torch.cuda.empty_cache()
    layers = [nn.Tanh() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), *layers).cuda(0)
    inputs = torch.randn(2 * ROWS, FEATURES)
    with ScatterOnceParallel(model, 2, [0], verify=False, graphs=graphs) as engine:
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats(0)
            model.zero_grad()
            engine.forward_backward(inputs, inputs, nn.MSELoss())
        replayed = engine.last_step.graphs.replayed
    return torch.cuda.max_memory_reserved(0) / LAYER, replayed


def test_graphs_take_up_to_twice_the_memory():
    """Their own activations, beside those of the sub-step that each step proves."""
    without, none = most_reserved(False)
    with_graphs, one = most_reserved(True)
    assert (none, one) == (0, 1)
    assert without + LAYERS <= with_graphs <= 2 * without
