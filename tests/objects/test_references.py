"""What a value refers to, another one like it of other parts, and walks along parts."""

from __future__ import annotations

import collections
import functools
import types
import weakref

import pytest
from harness.models import linear
from torch import nn

from scatterpar.objects.reach import reachable
from scatterpar.objects.references import (
    contents,
    globals_named_in,
    module_of,
    named_values,
    parts_of,
)

pytestmark = pytest.mark.core

ONE, OTHER = linear(), linear(seed=1)


class Two(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


Point = collections.namedtuple("Point", "x, y")

VALUES = {
    "method": (ONE.forward, lambda v: v.__self__),
    "partial": (functools.partial(print, ONE, end=ONE), lambda v: v.keywords["end"]),
    "tuple": ((1, ONE), lambda v: v[1]),
    "tuple with another constructor": (Two(1, ONE), lambda v: v[1]),
    "named tuple": (Point(1, ONE), lambda v: v.y),
    "reference": (weakref.ref(ONE), lambda v: v()),
    "proxy": (weakref.proxy(ONE), lambda v: v.__repr__.__self__),
    "weak method": (weakref.WeakMethod(ONE.forward), lambda v: v().__self__),
    "entry of a weak dictionary": (
        weakref.WeakValueDictionary(one=ONE).data["one"],
        lambda v: v(),
    ),
    "cached": (functools.lru_cache(4)(ONE.forward), lambda v: v.__wrapped__.__self__),
}


@pytest.mark.parametrize("kind", VALUES)
def test_remade_value_refers_to_new_parts(kind):
    value, read = VALUES[kind]

    def exchanged(part):
        if part is ONE:
            return OTHER
        if isinstance(part, types.MethodType):
            return types.MethodType(part.__func__, OTHER)
        return part

    parts = parts_of(value)
    made = parts.make(*map(exchanged, parts.made_of()))
    assert type(made) is type(value)
    assert read(value) is ONE
    assert read(made) is OTHER


def test_copied_cache_is_empty_of_same_size():
    cached = functools.lru_cache(7)(len)
    cached("abc")
    parts = parts_of(cached)
    assert parts.make(*parts.made_of()).cache_info() == (0, 0, 7, 0)


def test_dead_proxy_refers_to_nothing():
    gone = nn.Identity()
    proxy = weakref.proxy(gone)
    del gone
    assert parts_of(proxy).made_of() == []


NET = linear(seed=2)  # a global that functions name


def by_default(x, net=NET):
    return net(x)


def by_global(x):
    return [NET(row) for row in x]  # named by the code inside of the function


def by_attribute(x):
    return x.NET  # names no global


class Holder:
    def __init__(self):
        self.net = NET

    def loss(self, x):
        return self.net(x)


def closing(net):
    return lambda x: net(x)


NAMED = {
    "closure": (closing(NET), "net"),
    "default": (by_default, "net"),
    "global": (by_global, "NET"),
    "attribute of an object": (Holder(), "net"),
    "attribute of a method's object": (Holder().loss, "net"),
    "argument": (functools.partial(print, 1, NET), "argument 1"),
    "keyword": (functools.partial(print, end=NET), "end"),
    "partial of a partial": (
        functools.partial(functools.partial(print, NET)),
        "argument 0",
    ),
}


@pytest.mark.parametrize("way", NAMED)
def test_function_names_its_references(way):
    function, name = NAMED[way]
    assert named_values(function)[name] is NET
    assert any(value is NET for value in reachable(function))


def test_attribute_is_no_global():
    assert parts_of(by_attribute).file_globals == {}
    assert not any(value is NET for value in reachable(by_attribute))


@pytest.mark.parametrize("kind", [list, tuple, collections.deque, set, frozenset])
def test_only_fixed_containers_made_again(kind):
    parts = parts_of(kind([NET]))
    assert list(parts.entries) == [NET]
    assert any(value is NET for value in reachable({"nets": kind([NET])}))
    assert (parts.make is not None) == (kind in (tuple, frozenset))


def test_module_of_method_values_of_cells():
    assert module_of(ONE) is module_of(ONE.forward) is ONE
    assert module_of(print) is None
    late: object

    def reads():
        return late

    (cell,) = reads.__closure__
    assert contents(cell) is cell  # not bound yet
    late = ONE
    assert contents(cell) is ONE


def test_code_of_many_functions_is_read_once():
    """A walk from a model of transformers meets thousands, each look again."""
    codes = [compile(f"value_{number}", "many", "eval") for number in range(4000)]
    for code in codes:
        globals_named_in(code)
    before = globals_named_in.cache_info().misses
    for code in codes:
        globals_named_in(code)
    assert globals_named_in.cache_info().misses == before
