"""Saving, loading and copying: the module's own keys, as if there were no wrapper."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import randint, randn
from torch import nn
from torch.nn.functional import cross_entropy

from pair.common import Pair
from scatterpar import DataParallelCriterion, DataParallelModel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES).double())

    def forward(self, output, targets):
        return cross_entropy(output * self.weight, targets)


WRAPPERS = {
    "model": (lambda: DataParallelModel(mlp(), ["cpu"] * 2), lambda: mlp(seed=1)),
    "criterion": (lambda: DataParallelCriterion(Head(), ["cpu"] * 2), Head),
}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", WRAPPERS)
def test_keys_are_the_module_s_and_load_with_or_without_a_prefix(name, prefix):
    wrapper, other = (make() for make in WRAPPERS[name])
    with torch.no_grad():
        next(iter(other.parameters())).add_(1)
    assert list(wrapper.state_dict()) == list(other.state_dict())
    result = wrapper.load_state_dict({prefix + k: v for k, v in other.state_dict().items()})
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same(wrapper.module.state_dict(), other.state_dict())
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.fill_(7)
    assert all((parameter == 7).all() for parameter in wrapper.module.parameters())


def test_a_criterion_that_is_a_function_has_no_state():
    criterion = DataParallelCriterion(cross_entropy)
    assert criterion.state_dict() == {}
    assert list(criterion.parameters()) == []
    assert criterion.module is cross_entropy


def through_torch_save(wrapper):
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_copies_work_and_share_nothing(placed, way, ran_before):
    pair = Pair(mlp(), cross_entropy, placed(3))
    if ran_before:
        pair.check(*BATCH)
    twin = Pair(mlp(), cross_entropy, placed(3))
    twin.model, twin.criterion = COPIES[way](pair.model), COPIES[way](pair.criterion)
    twin.module = twin.model.module
    with torch.no_grad():
        twin.module[0].weight.mul_(2)
    pair.module.zero_grad()
    twin.check(*BATCH)
    assert pair.module[0].weight.grad is None
    pair.check(*BATCH)
    del pair
    gc.collect()
    twin.check(*BATCH)


def test_the_graph_needs_neither_the_pair_nor_its_threads(placed):
    pair = Pair(mlp(), nn.CrossEntropyLoss(), placed(4))
    loss = pair.loss(*BATCH)
    model = pair.module
    del pair
    gc.collect()
    loss.backward()
    assert model[0].weight.grad is not None
