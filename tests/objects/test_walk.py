"""What roots lead to, the places that refer to it, and their names."""

from __future__ import annotations

import collections
import functools
import queue
import weakref
from types import SimpleNamespace

import pytest
import torch
from harness.models import mlp
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.objects.walk import LONGEST_CHAIN, UNSET, PlaceKind, Walk

TARGET = nn.Identity()


class Owner:
    shared = None

    def __init__(self, value=None):
        self.value = value


class Slots:
    __slots__ = ("first", "second")


class Overrides(Slots):
    """Its class has the name of a slot of its base, as one of sympy has."""

    first = 0


class Computed(dict):
    def __getitem__(self, key):
        raise AssertionError("items are computed when they are asked for")


class Log(list):
    """A list with attributes."""


def closing_over(value):
    def function():
        return value

    return function


class Proxy:
    """Claims to be its object's class, as the objects of wrapt's decorators do."""

    def __init__(self, value):
        object.__setattr__(self, "target", value)

    @property
    def __class__(self):
        return type(object.__getattribute__(self, "target"))

    def __getattribute__(self, name):
        target = object.__getattribute__(self, "target")
        return target.__class__ if name == "__class__" else getattr(target, name)


def slots():
    value = Slots()
    value.first = TARGET
    return value


def of_class():
    kind = type("Owner", (Owner,), {"shared": TARGET, "__module__": __name__})
    return kind()


def log():
    value = Log([1])
    value.net = TARGET
    return value


def queued():
    value = queue.Queue()
    value.put(TARGET)
    return value


def names_a_global():
    return TARGET


LEADING = {  # what a root holds, and the name of the place
    "attribute": (lambda: Owner(TARGET), "value"),
    "list": (lambda: [1, TARGET], "[1]"),
    "entry of an attribute": (lambda: Owner({"a": [TARGET]}), "value['a'][0]"),
    "deque": (lambda: collections.deque([TARGET]), "[0]"),
    "slot": (slots, "first"),
    "attribute of a class": (of_class, "shared"),
    "attribute of a list": (log, "net"),
    "closure": (lambda: closing_over(TARGET), "value"),
    "proxy of a function": (lambda: Proxy(closing_over(TARGET)), "value"),
    "proxy of a module": (lambda: Proxy(nn.Sequential(TARGET)), "0"),
    "global": (lambda: names_a_global, "TARGET"),
    "tuple": (lambda: Owner((1, TARGET)), "value"),
    "partial": (lambda: Owner(functools.partial(len, TARGET)), "value"),
    "method": (lambda: Owner(TARGET.extra_repr), "value"),
    "library's decorator": (lambda: torch.no_grad()(closing_over(TARGET)), "value"),
    "module": (lambda: nn.Sequential(nn.ReLU(), TARGET), "1"),
    "queue": (queued, "queue[0]"),
}


@pytest.mark.parametrize("name", LEADING)
def test_places_lead_to_a_module(name):
    make, expected = LEADING[name]
    walk = Walk([make()])
    (number,) = [n for n, value in enumerate(walk.values) if value is TARGET]
    assert walk.name_of(number) == expected


NOT_FOLLOWED = {
    "weak reference": lambda: weakref.ref(TARGET),
    "weak proxy": lambda: weakref.proxy(TARGET),
    "library's object": lambda: torch.optim.SGD([torch.zeros(1)], 0.1),
    "computed items": lambda: Computed(a=TARGET),
    "more entries than are searched": lambda: [TARGET] * 1001,
    "method of a python module": lambda: functools,
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_value_leads_to_nothing(name):
    assert not Walk([Owner(NOT_FOLLOWED[name]())]).modules


def test_each_value_once_in_cycles():
    owner = Owner()
    owner.value = [owner, owner]
    walk = Walk([owner])
    assert sum(value is owner for value in walk.values) == 1


def test_long_chain_ends_and_deep_network_does_not():
    chain = TARGET
    for _ in range(LONGEST_CHAIN + 1):
        chain = [chain]
    assert not Walk([chain]).modules
    net = TARGET
    for _ in range(LONGEST_CHAIN + 1):
        net = nn.Sequential(net)
    assert TARGET in Walk([net]).modules


def test_unset_places_are_places():
    value = Slots()
    slots = [p for p in Walk([value]).places if p.kind is PlaceKind.SLOT]
    places = {place.key.__name__: place for place in slots}
    assert places["first"].read() is UNSET
    places["first"].write(3)
    assert value.first == 3
    places["first"].write(UNSET)
    assert not hasattr(value, "first")


def test_class_that_overrides_a_slot_is_read():
    (first, _) = Walk([Overrides()]).places[:2]
    assert first.read() is UNSET


def test_names_of_layers_have_no_registries():
    net = nn.Sequential(nn.BatchNorm1d(2))
    net[0].history = [Owner()]
    walk = Walk([net])
    names = {walk.name_of(number) for number in range(len(walk.values))}
    assert {"0.weight", "0.running_mean", "0.history[0]"} <= names


def test_wrapper_leads_to_its_module():
    with ScatterOnceParallel(mlp(), 1, ["cpu"]) as engine:
        walk = Walk([SimpleNamespace(engine=engine)])
    assert walk.modules[0] is engine.module
    assert PlaceKind.PART in {place.kind for place in walk.places}
