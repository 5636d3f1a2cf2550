"""The names of values that a graph may have frozen.

``test_cuda_graphs.py`` has looks at replays.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from scatterpar.options.replay_look import changed_names, plain_values

SCALE = 2.0
OPTIONS = {"inner": [1, {"deep": 3}]}


class Held:
    def __init__(self):
        self.value = 5
        self.itself = self

    def method(self, output, targets):
        return output * self.value

    def __call__(self, output, targets):
        return output * SCALE


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.held = Held()

    def forward(self, rows):
        return self.layer(rows) * OPTIONS["inner"][0]


def closed(value):
    return lambda output, targets: output * value


def by_global(output, targets):
    return output * SCALE + OPTIONS["inner"][0]


class Hostile:
    @property
    def __dict__(self):
        raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("root", "name", "value"),
    [
        (by_global, "SCALE", 2.0),
        (by_global, "OPTIONS['inner'][1]['deep']", 3),
        (closed(7), "value", 7),
        (partial(by_global, targets=4), "targets= of the functools.partial", 4),
        (partial(by_global, 9), "argument 0 of the functools.partial", 9),
        (Held(), "value", 5),
        (Held(), "SCALE", 2.0),
        (Held().method, "self.value", 5),
        (Scaled(), "Scaled.held.value", 5),
        (Scaled(), "OPTIONS['inner'][0]", 1),
    ],
)
def test_value_named_as_it_is_read(root, name, value):
    assert plain_values([root])[name] == value


def test_changed_values_are_named():
    held = Held()
    held.tensor = torch.ones(2)
    before = plain_values([held.method])
    held.tensor.mul_(2)  # in place: a graph reads it
    assert changed_names(before, plain_values([held.method])) == []
    held.value, former, held.tensor = 6, held.tensor, torch.ones(2)
    names = changed_names(before, plain_values([held.method]))
    assert names == ["self.value", "self.tensor"]
    assert former is not held.tensor


def test_unreadable_object_left_out():
    assert plain_values([[Hostile(), 3]]) == {"[1]": 3}
