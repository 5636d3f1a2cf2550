"""All that a module holds is found: in attributes, containers, keys, functions' owners."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from harness.models import CLASSES, FEATURES, linear
from harness.oracle import assert_step, build, randn
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.replicas.module_contents import (
    ModuleContents,
    is_shared_data,
    root_to_replicate,
)
from scatterpar.replicas.module_copy import ModuleCopy

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


def test_containers_of_closures_found_once():
    """Also that of a function which is in another function's container."""
    model = linear()
    model.hidden = [linear(seed=1)]
    inner = [model]
    outer = [lambda: inner]
    model.hook = lambda: outer
    hidden = model.hidden
    model.look_up = lambda: hidden
    found = [each for each in ModuleContents((model,)).containers if type(each) is list]
    assert sorted(map(id, found)) == sorted(map(id, [hidden, outer, inner]))


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


LONG = 1001


class Looks(nn.Module):
    """Looks a factor up in long containers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.words = [f"w{number}" for number in range(LONG)]
        self.numbers = {word: number for number, word in enumerate(self.words)}
        self.files = [(word, 1) for word in self.words]
        self.layers = [nn.Linear(CLASSES, CLASSES) for _ in range(LONG)]

    def forward(self, rows):
        factor = self.numbers[self.words[-1]] / LONG + self.files[3][1]
        return self.linear(rows) * factor


def test_long_containers_of_plain_values_are_shared():
    """Each step searched them: 1.8 times plain torch's time, and 6 with the pair."""
    module = build(Looks)
    contents = ModuleContents((module,))
    found = list(map(id, contents.containers))
    for container in (module.words, module.numbers, module.files):
        assert id(container) not in found
        assert is_shared_data(container)
    assert id(module.layers) in found
    assert len(contents.modules) == LONG + 2
    replica = ModuleCopy(contents, list(contents.tensors.values())).copy_of(module)
    assert replica.words is module.words
    assert replica.layers is not module.layers


@pytest.mark.parametrize(
    "entries",
    [
        [*[0] * LONG, torch.zeros(1), 0],
        [("a", torch.zeros(1))] * LONG,
        {number: [nn.Linear(1, 1)] for number in range(LONG)},
        [{"a": 1}] * LONG,
        ["a"] * 5,
    ],
)
def test_what_may_hold_tensors_is_no_data(entries):
    assert not is_shared_data(entries)


def test_change_of_a_long_container_reaches_next_step(devices):
    module = build(Looks)
    del module.layers  # which take the time, and do not change
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        for number in range(3):
            module.numbers[module.words[-1]] = number * LONG
            if number == 2:
                module.files = [(word, 5) for word in module.words]
            assert_step(engine, randn(9, FEATURES), randn(9, CLASSES), F.mse_loss)
