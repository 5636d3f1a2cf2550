"""What an object refers to, and another one like it that refers to copies."""

from __future__ import annotations

import collections
import functools
import types
import weakref

import pytest
from harness.models import linear
from torch import nn

from scatterpar.replicas.references import contents, module_of, references

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
    "cached": (functools.lru_cache(4)(ONE.forward), lambda v: v.__wrapped__.__self__),
}


@pytest.mark.parametrize("kind", VALUES)
def test_another_value_of_the_same_kind_refers_to_what_is_given(kind):
    value, read = VALUES[kind]

    def exchanged(part):
        if part is ONE:
            return OTHER
        if isinstance(part, types.MethodType):
            return types.MethodType(part.__func__, OTHER)
        return part

    parts, make = references(value)
    made = make(*map(exchanged, parts))
    assert type(made) is type(value)
    assert read(value) is ONE
    assert read(made) is OTHER


def test_the_copy_of_a_cache_is_empty_and_of_the_same_size():
    cached = functools.lru_cache(7)(len)
    cached("abc")
    parts, make = references(cached)
    assert make(*parts).cache_info() == (0, 0, 7, 0)


def test_a_proxy_whose_object_is_gone_refers_to_nothing():
    gone = nn.Identity()
    proxy = weakref.proxy(gone)
    del gone
    assert references(proxy)[0] == ()


def test_the_module_of_a_method_and_the_contents_of_cells():
    assert module_of(ONE) is module_of(ONE.forward) is ONE
    assert module_of(print) is None
    late: object

    def reads():
        return late

    (cell,) = reads.__closure__
    assert contents(cell) is cell  # not bound yet
    late = ONE
    assert contents(cell) is ONE
