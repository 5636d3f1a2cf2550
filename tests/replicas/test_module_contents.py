"""All that a module holds is found: in attributes, containers, keys, functions' owners."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from harness.models import linear
from torch import nn

from scatterpar.replicas.module_contents import (
    ModuleContents,
    root_to_replicate,
)

pytestmark = pytest.mark.core


def test_modules_in_containers_found_once():
    model, inner, key = nn.Sequential(linear()), linear(seed=1), linear(seed=2)
    model.hidden = [inner, inner]
    model.names = {key: "a name"}
    model.call = inner.forward
    model.parent = weakref.proxy(model)
    found = ModuleContents((model,))
    modules = list(found.modules.values())
    assert [sum(one is each for each in modules) for one in (model, inner, key)] == [
        1,
        1,
        1,
    ]
    assert len(modules) == 4  # a proxy is no module
    assert found.weights == set(
        map(id, [p for m in modules for p in m.parameters(False)])
    )


def test_tensors_of_other_devices_left_out():
    model = linear()
    model.elsewhere = torch.ones(2, device="meta")
    found = ModuleContents((model,), torch.device("cpu"))
    assert set(found.tensors) == set(map(id, model.parameters()))


def test_facts_show_changed_dtype():
    model = linear()
    found = ModuleContents((model,))
    before = found.facts()
    model.weight.data = model.weight.data.float()
    assert found.facts() != before


def test_criteria_with_state_are_replicated():
    net = linear()
    assert root_to_replicate(nn.MSELoss()) is None
    assert root_to_replicate(print) is None
    assert root_to_replicate(net.forward) is net
    weighted = nn.CrossEntropyLoss(torch.ones(3))
    assert root_to_replicate(weighted) is weighted
    bound = functools.partial(print, net=net)
    assert root_to_replicate(bound) is bound
    assert root_to_replicate(functools.partial(print, end="")) is None
