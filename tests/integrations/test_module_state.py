"""State of a replica's module that a call moves: numbers, tensors, lists."""

import pytest
import torch
from torch import nn

from scatterpar.integrations.module_state import ModuleState


class Metric(nn.Module):
    """Has each kind of state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("right", torch.zeros(()))
        self.part = nn.Module()
        self.part.rows = torch.zeros(())
        self.count = 0
        self.values = []


MOVED = {
    "buffer": lambda m: m.right.add_(1),
    "tensor in place": lambda m: m.part.rows.add_(1),
    "tensor": lambda m: setattr(m.part, "rows", m.part.rows + 1),
    "number": lambda m: setattr(m, "count", 3),
    "list": lambda m: m.values.append(1),
    "another type": lambda m: setattr(m, "count", torch.ones(())),
    "another name": lambda m: setattr(m, "other", 1),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_state_is_seen(name):
    metric = Metric()
    state = ModuleState(metric)
    assert not state.is_moved()
    MOVED[name](metric)
    assert state.is_moved()


def test_modules_with_parameters_have_none():
    teacher = nn.BatchNorm1d(2)
    state = ModuleState(teacher)
    teacher(torch.randn(3, 2, generator=torch.Generator().manual_seed(1)))
    assert not state.is_moved()
