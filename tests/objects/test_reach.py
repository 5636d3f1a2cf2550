"""What each walk follows, how deep, and how many: a row per way, a word per question."""

from __future__ import annotations

import collections
import functools
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from scatterpar.batch.refused_outputs import refuse_graphs
from scatterpar.objects.reach import distinguishing_values, reachable, values_to_search
from scatterpar.objects.walk import Walk
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.replicas.module_copy import ModuleCopy

pytestmark = pytest.mark.core
# What each way leads to.
TARGET = nn.Parameter(torch.zeros(3))
WITH_GRAPH = TARGET * 1


class Owner:
    def __init__(self, value):
        self.value = value

    def method(self):
        return self.value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Items(list):
    """A list with attributes."""


class Net(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value


def closing_over(value):
    def function():
        return value

    return function


def with_default(value):
    def function(argument=value):
        return argument

    return function


def naming_a_global(value):
    namespace = {"VALUE": value, "__name__": __name__}
    exec("def function():\n    return VALUE", namespace)
    return namespace["function"]


def with_attribute(value):
    def function():
        pass

    function.value = value
    return function


def cached(value):
    return functools.lru_cache(closing_over(value))


def of_class(value):
    return type("Kind", (), {"value": value, "__module__": __name__})()


def attribute_of_a_list(value):
    items = Items()
    items.value = value
    return items


def in_a_chain(length):
    def chain(value):
        for _ in range(length):
            value = [value]
        return value

    return chain


def in_functions(number):
    def chain(value):
        for _ in range(number):
            value = closing_over(value)
        return value

    return chain


def among(entries, position):
    def container(value):
        items = [object() for _ in range(entries - 1)]
        items.insert(position, value)
        return items

    return container


def amid_a_log(value):
    """Its entries are objects of one class, so none of them is a tensor."""
    return [*map(Owner, range(50)), Owner(value), *map(Owner, range(50))]


WAYS = {
    "argument of a partial": lambda value: functools.partial(print, value),
    "object of a method": lambda value: Owner(value).method,
    "closure": closing_over,
    "default": with_default,
    "global": naming_a_global,
    "attribute of a function": with_attribute,
    "closure of a cached function": cached,
    "attribute": Owner,
    "slot": Slots,
    "attribute of a class": of_class,
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "set": lambda value: {value},
    "frozenset": lambda value: frozenset([value]),
    "deque": lambda value: collections.deque([value]),
    "value of a dict": lambda value: {"value": value},
    "key of a dict": lambda value: {value: 0},
    "attribute of a list": attribute_of_a_list,
    "attribute of a module": Net,
    "attribute of a library's object": lambda value: TensorDataset(
        value.detach() if 0 else value
    ),
    "weak reference": weakref.ref,
    "3 lists": in_a_chain(3),
    "4 lists": in_a_chain(4),
    "5 lists": in_a_chain(5),
    "16 lists": in_a_chain(16),
    "17 lists": in_a_chain(17),
    "amid 32 entries": among(32, 16),
    "amid 33 entries": among(33, 16),
    "amid 64 entries": among(64, 32),
    "amid 65 entries": among(65, 32),
    "amid 1000 entries": among(1000, 500),
    "amid 1001 entries": among(1001, 500),
    "amid a log": amid_a_log,
    "its id": lambda value: {id(value): 0},
    "20 functions": in_functions(20),
    "lists in functions": lambda value: in_functions(3)([in_functions(3)([value])]),
    "at the end of a log": lambda value: [*map(Owner, range(99)), Owner(value)],
}


def has(values, wanted):
    return any(value is wanted for value in values)


def is_copied(way):
    """Whether replicas have a copy of a function that closes over a way to a tensor of
    theirs, with a copy of this way.
    """
    net = Net(TARGET)
    value = way(TARGET)
    net.hook = closing_over(value)
    contents = ModuleContents([net])
    tensors = [tensor.detach().clone() for tensor in contents.tensors.values()]
    return ModuleCopy(contents, tensors).copy_of(net).hook() is not value


def has_graph(value):
    try:
        refuse_graphs([value])
    except TypeError:
        return True
    return False


QUESTIONS = {
    "use": lambda way: has(reachable(way(TARGET)), TARGET),
    "train": lambda way: has(values_to_search(way(TARGET)), TARGET),
    "program": lambda way: has(distinguishing_values([way(TARGET)]), TARGET),
    "write": lambda way: has(Walk([way(TARGET)]).tensors.values(), TARGET),
    "copy": lambda way: has(ModuleContents([way(TARGET)]).tensors.values(), TARGET),
    "hook": is_copied,
    "output": lambda way: has_graph(way(WITH_GRAPH)),
}

FOLLOWED = {
    "argument of a partial": "use train program write copy hook",
    "object of a method": "use train program write",
    "closure": "use train program write hook",
    "default": "use train program write hook",
    "global": "use train program write",
    "attribute of a function": "write output",
    "closure of a cached function": "use train program write hook",
    "attribute": "use train program write output",
    "slot": "write output",
    "attribute of a class": "write",
    "list": "use train program write copy hook output",
    "tuple": "use train program write copy hook output",
    "set": "use train program write copy hook output",
    "frozenset": "use train program write copy hook output",
    "deque": "use train program write copy hook output",
    "value of a dict": "use train program write copy hook output",
    "key of a dict": "write copy hook",
    "attribute of a list": "write",
    "attribute of a module": "write copy",
    "attribute of a library's object": "write output",
    "weak reference": "hook",
    "3 lists": "use train program write copy hook output",
    "4 lists": "use train program write copy hook output",
    "5 lists": "program write copy hook output",
    "16 lists": "program write copy hook output",
    "17 lists": "program copy hook output",
    "amid 32 entries": "use train program write copy hook output",
    "amid 33 entries": "use train write copy hook output",
    "amid 64 entries": "use train write copy hook output",
    "amid 65 entries": "use train write copy hook output",
    "amid 1000 entries": "use train write copy hook output",
    "amid 1001 entries": "copy output",
    "amid a log": "use write output",
    "its id": "hook",
    "20 functions": "program hook",
    "lists in functions": "program write hook",
    "at the end of a log": "use train write output",
}


@pytest.mark.parametrize("name", WAYS)
def test_each_question_follows(name):
    way = WAYS[name]
    followed = [question for question, leads in QUESTIONS.items() if leads(way)]
    assert " ".join(followed) == FOLLOWED[name]


def test_number_of_values_ends_a_search():
    """The nearest come first, so that what is far is left out."""
    lists = [[[[] for _ in range(4)] for _ in range(60)] for _ in range(60)]
    assert len(values_to_search(lists)) == 10_000
    assert len(reachable(lists)) == 1 + 60 + 60 * 60 + 4 * 60 * 60
    numbers = [[number] for number in range(30)]
    assert len(distinguishing_values([numbers])) == 1 + 30 + 30
    assert len(distinguishing_values([numbers, [0, 1, 2, 3, 4]])) == 64
