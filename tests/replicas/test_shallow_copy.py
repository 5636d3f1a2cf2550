"""A shallow copy of a module: another object of its class, whatever that class does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from harness.models import linear
from torch import nn

from scatterpar.replicas.shallow_copy import new_like

pytestmark = pytest.mark.core


class Numbered(nn.Linear):
    made = 0

    def __new__(cls, *args):
        cls.made += 1
        return super().__new__(cls)


class ReturnsItself(nn.Linear):
    def _replicate_for_data_parallel(self):
        return self


class ReadOnly(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.in_features = inputs

    def __setattr__(self, name, value):
        if "in_features" in vars(self):
            raise AttributeError(f"{name} cannot be set any more")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [nn.Linear, Numbered, ReturnsItself, ReadOnly])
def test_copy_has_same_contents(kind):
    with torch.random.fork_rng(devices=[]):
        model = kind(2, 3)
    before = dict(vars(model))
    made = new_like(model)
    assert type(made) is kind
    assert made is not model
    assert vars(model) == before
    assert made.in_features == 2
    assert kind is not Numbered or kind.made == 1


def test_zero_grad_warns_on_shallow_copy():
    """``zero_grad`` of a deep copy of the copy works."""
    model = linear()
    made = new_like(model)
    made._parameters = dict(model._parameters)
    with pytest.warns(UserWarning, match="zero_grad.. inside forward has no effect"):
        made.zero_grad()
    deep = copy.deepcopy(made)
    deep.weight.grad = torch.ones_like(deep.weight)
    deep.zero_grad()
    assert deep.weight.grad is None
    pickle.loads(pickle.dumps(made))
