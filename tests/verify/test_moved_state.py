"""State that each call of a module moves, found by name."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scatterpar.verify.moved_state import attributes_of, moved_between, state_of


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("entries", torch.zeros(2))
        self.register_buffer("nothing", None)
        self.calls = 0
        self.last = torch.ones(1)
        self.name = "queue"


def replicas(module):
    return [SimpleNamespace(root=module), SimpleNamespace(root=len)]


def test_buffers_and_attributes_named():
    outer = nn.Module()
    outer.inner = Queue()
    names = {"the buffer 'inner.entries'", "the attribute 'inner.calls'"}
    assert state_of(replicas(outer)).keys() == names | {"the attribute 'inner.last'"}
    assert attributes_of(replicas(Queue())).keys() == {
        "the attribute 'calls'",
        "the attribute 'last'",
    }


def test_state_values_are_copies():
    queue = Queue()
    before = state_of(replicas(queue))
    queue.entries += 1
    queue.calls += 1
    after = state_of(replicas(queue))
    assert before["the buffer 'entries'"].tolist() == [0, 0]
    assert moved_between([before, after]) == [
        "the buffer 'entries'",
        "the attribute 'calls'",
    ]


def test_tensor_with_graph_is_no_state():
    queue = Queue()
    queue.last = torch.ones(1, requires_grad=True) * 2
    assert "the attribute 'last'" not in state_of(replicas(queue))


@pytest.mark.parametrize(
    ("first", "second", "is_moved"),
    [
        (1, 2, True),
        (1, 1, False),
        (math.nan, math.nan, False),
        (1, 1.5, False),  # of another type: nothing is compared
        (torch.ones(2), torch.ones(2), False),
        (torch.zeros(1), -torch.zeros(1), True),  # other bits
    ],
)
def test_only_values_of_one_type_compared(first, second, is_moved):
    assert moved_between([{"x": first}, {"x": second}]) == ["x"] * is_moved


def test_one_state_has_not_moved():
    assert moved_between([{"x": 1}]) == []
