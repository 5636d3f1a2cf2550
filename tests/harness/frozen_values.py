"""Values that a captured sub-step freezes, each where a program of its own keeps it.

``CHANGED[name]()`` returns a function of a tensor, which reads a value, and what changes
this value between two steps. ``MOVING[name]()`` returns a function that computes
something else, or leaves something behind, in each call.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import decimal
import enum
import fractions
import functools
import itertools
import os
import random
import threading
import time
import types
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHANGED = {}
MOVING = {}


def changed(make):
    CHANGED[make.__name__] = make
    return make


def moving(make):
    MOVING[make.__name__] = make
    return make


# --- where Python keeps a number ---

FACTOR = 1.5
TABLE = {"factor": 1.5, "deep": {"er": [1.5]}}
SETTINGS = types.ModuleType("settings")
VARIABLE = contextvars.ContextVar("factor", default=1.5)


def in_holder(holder, read, write=None):
    """A function that reads a number from an object, and what writes another one."""
    write = write or (lambda: setattr(holder, "factor", 2.5))
    return (lambda x: x * read(holder)), write


def by_attribute(holder):
    return in_holder(holder, lambda h: h.factor)


class Plain:
    factor = 1.5


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.5


@dataclasses.dataclass
class Record:
    factor: float = 1.5


class Point(NamedTuple):
    factor: float


class Level(enum.Enum):
    LOW = 1.5
    HIGH = 2.5


class Computed:
    def __init__(self):
        self.half = 0.75

    @property
    def factor(self):
        return 2 * self.half


class ByKey:
    def __init__(self):
        self.values = {"factor": 1.5}

    def __getitem__(self, key):
        return self.values[key]


class ByName(ByKey):
    def __getattr__(self, name):
        return self.__dict__["values"][name]


class Keys(dict):
    pass


def inner_factor():
    return TABLE["deep"]["er"][0]


def outer_factor():
    return inner_factor()


def helper():
    return 1.5


def with_default(x, factor=1.5):
    return x * factor


@functools.cache
def cached_factor():
    return TABLE["factor"]


@changed
def a_global():
    return (lambda x: x * FACTOR), lambda: globals().update(FACTOR=2.5)


@changed
def an_entry_of_a_global():
    return (lambda x: x * TABLE["factor"]), lambda: TABLE.update(factor=2.5)


@changed
def a_number_two_functions_away():
    def change():
        TABLE["deep"]["er"][0] = 2.5

    return (lambda x: x * outer_factor()), change


@changed
def a_variable_of_the_function_around():
    factor = 1.5

    def change():
        nonlocal factor
        factor = 2.5

    return (lambda x: x * factor), change


@changed
def a_variable_of_a_function_inside():
    factor = 1.5

    def read():
        return factor

    def change():
        nonlocal factor
        factor = 2.5

    return (lambda x: x * read()), change


@changed
def an_entry_of_a_list():
    numbers = [1.5]
    return in_holder(numbers, lambda n: n[0], lambda: numbers.__setitem__(0, 2.5))


@changed
def the_length_of_a_list():
    numbers = [1, 2]
    return in_holder(numbers, len, lambda: numbers.append(3))


@changed
def the_last_entry_of_a_deque():
    numbers = collections.deque([1.5])
    return in_holder(numbers, lambda n: n[-1], lambda: numbers.append(2.5))


@changed
def a_member_of_a_set():
    words = {"a"}
    return in_holder(words, lambda w: 2.5 if "b" in w else 1.5, lambda: words.add("b"))


@changed
def a_chained_map():
    first, second = {}, {"factor": 1.5}
    chain = collections.ChainMap(first, second)
    return in_holder(chain, lambda c: c["factor"], lambda: first.update(factor=2.5))


@changed
def a_view_of_a_dict():
    numbers = {"factor": 1.5}
    view = types.MappingProxyType(numbers)
    return in_holder(view, lambda v: v["factor"], lambda: numbers.update(factor=2.5))


@changed
def a_subclass_of_dict():
    keys = Keys(factor=1.5)
    return in_holder(keys, lambda k: k["factor"], lambda: keys.update(factor=2.5))


@changed
def an_attribute():
    return by_attribute(Plain())


@changed
def an_attribute_of_a_class():
    class Own:
        factor = 1.5

    own = Own()
    return in_holder(own, lambda o: o.factor, lambda: setattr(Own, "factor", 2.5))


@changed
def a_slot():
    return by_attribute(Slotted())


@changed
def a_field_of_a_dataclass():
    return by_attribute(Record())


@changed
def a_namespace():
    return by_attribute(types.SimpleNamespace(factor=1.5))


@changed
def an_attribute_of_a_module_of_python():
    SETTINGS.factor = 1.5
    return by_attribute(SETTINGS)


@changed
def a_named_tuple_exchanged():
    holder = types.SimpleNamespace(point=Point(1.5))
    return in_holder(
        holder,
        lambda h: h.point.factor,
        lambda: setattr(holder, "point", Point(2.5)),
    )


@changed
def a_member_of_an_enum():
    holder = types.SimpleNamespace(level=Level.LOW)
    return in_holder(
        holder, lambda h: h.level.value, lambda: setattr(holder, "level", Level.HIGH)
    )


@changed
def a_property():
    own = Computed()
    return in_holder(own, lambda o: o.factor, lambda: setattr(own, "half", 1.25))


@changed
def an_item_by_a_method():
    own = ByKey()
    return in_holder(own, lambda o: o["factor"], lambda: own.values.update(factor=2.5))


@changed
def an_attribute_by_a_method():
    own = ByName()
    return in_holder(own, lambda o: o.factor, lambda: own.values.update(factor=2.5))


@changed
def an_attribute_by_a_computed_name():
    return in_holder(Plain(), lambda o: getattr(o, "fac" + "tor"))


@changed
def all_attributes():
    own = Record()
    return in_holder(own, lambda o: sum(vars(o).values()))


@changed
def an_object_in_a_list():
    records = [Record(), Record()]
    return in_holder(
        records,
        lambda r: r[0].factor * r[1].factor,
        lambda: setattr(records[1], "factor", 2.5),
    )


@changed
def an_object_behind_a_weak_reference():
    record = Record()
    reference = weakref.ref(record)
    return in_holder(
        reference, lambda r: r().factor, lambda: setattr(record, "factor", 2.5)
    )


@changed
def a_function_in_an_attribute():
    numbers = [1.5]
    holder = types.SimpleNamespace(read=lambda: numbers[0])
    return in_holder(holder, lambda h: h.read(), lambda: numbers.__setitem__(0, 2.5))


@changed
def a_keyword_of_a_partial():
    function = functools.partial(with_default, factor=1.5)
    return function, lambda: function.keywords.update(factor=2.5)


@changed
def an_object_of_a_partial():
    record = Record()
    function = functools.partial(lambda r, x: x * r.factor, record)
    return function, lambda: setattr(record, "factor", 2.5)


@changed
def a_default_argument():
    return with_default, lambda: setattr(with_default, "__defaults__", (2.5,))


@changed
def a_function_exchanged():
    return (lambda x: x * helper()), (lambda: globals().update(helper=lambda: 2.5))


@changed
def a_cache_that_is_cleared():
    def change():
        TABLE["factor"] = 3.5
        cached_factor.cache_clear()

    return (lambda x: x * cached_factor()), change


@changed
def a_context_variable():
    # Workers carry the caller's context.
    return (lambda x: x * VARIABLE.get()), lambda: VARIABLE.set(2.5)


@changed
def a_variable_of_the_environment():
    def change():
        os.environ["SCATTERPAR_TEST_FACTOR"] = "2.5"

    return (
        lambda x: x * float(os.environ.get("SCATTERPAR_TEST_FACTOR", "1.5"))
    ), change


@changed
def an_array_of_numpy():
    numbers = np.array([1.5])
    return in_holder(
        numbers, lambda n: float(n[0]), lambda: numbers.__setitem__(0, 2.5)
    )


@changed
def an_array_of_python():
    numbers = array.array("d", [1.5])
    return in_holder(numbers, lambda n: n[0], lambda: numbers.__setitem__(0, 2.5))


@changed
def text_that_is_parsed():
    words = bytearray(b"1.5")
    return in_holder(
        words, lambda w: float(bytes(w)), lambda: words.__setitem__(0, ord("2"))
    )


@changed
def a_decimal():
    holder = types.SimpleNamespace(factor=decimal.Decimal("1.5"))
    return in_holder(
        holder,
        lambda h: float(h.factor),
        lambda: setattr(holder, "factor", decimal.Decimal("2.5")),
    )


@changed
def a_fraction():
    holder = types.SimpleNamespace(factor=fractions.Fraction(3, 2))
    return in_holder(
        holder,
        lambda h: float(h.factor),
        lambda: setattr(holder, "factor", fractions.Fraction(5, 2)),
    )


# --- what is no factor ---


def by_switch(first, second):
    """A function that takes another way after the change."""
    holder = types.SimpleNamespace(is_on=False)

    def function(x):
        return second(x) if holder.is_on else first(x)

    return function, lambda: setattr(holder, "is_on", True)


@changed
def another_operator():
    return by_switch(torch.tanh, torch.sigmoid)


@changed
def another_dimension():
    return by_switch(lambda x: x.cumsum(0), lambda x: x.cumsum(1))


@changed
def another_shape():
    return by_switch(lambda x: x[:, :2], lambda x: x[:, :1])


@changed
def another_dtype():
    return by_switch(lambda x: x.float(), lambda x: x.bfloat16().float())


@changed
def another_order():
    return by_switch(lambda x: (x + 1) * 2, lambda x: x * 2 + 1)


@changed
def no_graph_from_here():
    return by_switch(lambda x: x * x.tanh(), lambda x: x * x.tanh().detach())


@changed
def minus_zero():
    return by_switch(
        lambda x: torch.atan2(x * 0, torch.full_like(x, 0.0)),
        lambda x: torch.atan2(x * 0, torch.full_like(x, -0.0)),
    )


@changed
def true_in_the_place_of_one():
    ones = torch.ones(CLASSES, dtype=torch.int64)
    return by_switch(lambda x: x * (ones + 1), lambda x: x * (ones + True) * 2)


@changed
def a_constant_made_in_each_call():
    holder = types.SimpleNamespace(values=[1.5, 2.0, 2.5])
    return in_holder(
        holder,
        lambda h: torch.tensor(h.values, dtype=torch.float64),
        lambda: setattr(holder, "values", [1.5, 2.0, 3.5]),
    )


@changed
def an_array_made_in_each_call():
    holder = types.SimpleNamespace(factor=1.5)
    return in_holder(holder, lambda h: torch.from_numpy(np.full(CLASSES, h.factor)))


@changed
def an_array_that_a_tensor_shares():
    numbers = np.full(CLASSES, 1.5)
    return in_holder(numbers, torch.from_numpy, lambda: numbers.__setitem__(0, 2.5))


@changed
def a_filled_constant():
    holder = types.SimpleNamespace(factor=1.5)
    return in_holder(
        holder, lambda h: torch.full((CLASSES,), h.factor, dtype=torch.float64)
    )


@changed
def a_tensor_exchanged():
    holder = types.SimpleNamespace(factor=torch.full((CLASSES,), 1.5))
    return in_holder(
        holder,
        lambda h: h.factor.double(),
        lambda: setattr(holder, "factor", torch.full((CLASSES,), 2.5)),
    )


@changed
def a_view_exchanged():
    matrix = torch.arange(9.0, dtype=torch.float64).view(3, 3)
    views = matrix.t(), matrix
    return by_switch(lambda x: x @ views[0], lambda x: x @ views[1])


@changed
def a_number_read_from_a_tensor():
    number = torch.tensor(1.5)
    return (lambda x: x * number.item()), lambda: number.fill_(2.5)


@changed
def a_flag_of_torch():
    matmul = torch.backends.cuda.matmul

    def change():
        matmul.allow_tf32 = not matmul.allow_tf32

    return (lambda x: x * (1.5 if matmul.allow_tf32 else 2.5)), change


@changed
def a_number_of_the_backward_pass():
    holder = types.SimpleNamespace(factor=1.5)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x * 1

        @staticmethod
        def backward(_, gradient):
            return gradient * holder.factor

    return Scaled.apply, lambda: setattr(holder, "factor", 2.5)


@changed
def a_hook_on_an_output():
    holder = types.SimpleNamespace(factor=1.5)

    def function(x):
        y = x * 1
        y.register_hook(lambda gradient: gradient * holder.factor)
        return y

    return function, lambda: setattr(holder, "factor", 2.5)


@changed
def a_checkpoint():
    return by_switch(
        lambda x: x.tanh().sin(),
        lambda x: checkpoint(lambda y: y.tanh().sin(), x, use_reentrant=False),
    )


@changed
def a_number_inside_a_checkpoint():
    holder = types.SimpleNamespace(factor=1.5)

    def inner(x):
        return (x * holder.factor).tanh()

    return (
        lambda x: checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False)
    ), lambda: setattr(holder, "factor", 2.5)


def cast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.float(), torch.eye(CLASSES)).double()


@changed
def autocast_inside():
    return by_switch(lambda x: F.linear(x, torch.eye(CLASSES).double()), cast)


@changed
def a_number_beside_dropout():
    holder = types.SimpleNamespace(factor=1.5)
    return (lambda x: F.dropout(x, 0.5) * holder.factor), (
        lambda: setattr(holder, "factor", 2.5)
    )


@changed
def a_rate_of_dropout():
    holder = types.SimpleNamespace(rate=0.5)
    return (lambda x: F.dropout(x, holder.rate)), lambda: setattr(holder, "rate", 0.25)


@changed
def a_seed_in_the_call():
    return by_switch(lambda x: F.dropout(x, 0.5), seeded_dropout)


def seeded_dropout(x):
    torch.manual_seed(11)
    return F.dropout(x, 0.5)


# --- what a program changes in its module; ``CHANGED_MODULES[name]`` gets it ---

CLASSES = 3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, CLASSES)
        self.norm = nn.BatchNorm1d(CLASSES)
        self.drop = nn.Dropout(0.5)
        self.act = nn.LeakyReLU(0.1)
        self.factor = 1.5
        self.table = {"factor": 1.5}
        self.numbers = [1.5]

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.body(x))))
        return x * self.factor * self.table["factor"] * self.numbers[-1]


CHANGED_MODULES = {
    "an attribute": lambda net: setattr(net, "factor", 2.5),
    "a dict": lambda net: net.table.update(factor=2.5),
    "a list that grows": lambda net: net.numbers.append(2.5),
    "training mode": lambda net: net.eval(),
    "training mode of a part": lambda net: net.norm.eval(),
    "the rate of dropout": lambda net: setattr(net.drop, "p", 0.25),
    "a slope": lambda net: setattr(net.act, "negative_slope", 0.3),
    "eps": lambda net: setattr(net.norm, "eps", 0.1),
    "momentum": lambda net: setattr(net.norm, "momentum", 0.5),
    "a part": lambda net: setattr(net, "act", nn.Tanh()),
    "a hook": lambda net: net.body.register_forward_hook(lambda m, i, o: o * 2),
    "a hook of the backward pass": lambda net: net.body.register_full_backward_hook(
        lambda m, i, o: tuple(g if g is None else g * 2 for g in i)
    ),
    "requires_grad": lambda net: net.body.bias.requires_grad_(False),
    "a method": lambda net: setattr(net.act, "forward", torch.tanh),
    "the memory of a parameter": lambda net: setattr(
        net.body.weight, "data", net.body.weight.detach() * 2
    ),
    "a parameter": lambda net: setattr(
        net.body, "bias", nn.Parameter(torch.ones_like(net.body.bias))
    ),
}
# Values of torch's own losses.
CHANGED_LOSSES = {
    "label smoothing": lambda loss: setattr(loss, "label_smoothing", 0.5),
    "weights": lambda loss: setattr(
        loss, "weight", torch.tensor([1.0, 2.0, 3.0]).double()
    ),
}


# --- what moves in each call ---


@moving
def a_counter():
    record = Record()

    def function(x):
        record.factor += 1
        return x * record.factor

    return function


@moving
def a_counter_without_effect_at_first():
    record = Record()

    def function(x):
        record.factor += 1
        return x * (1.0 if record.factor < 12 else 2.0)

    return function


@moving
def a_list_that_each_call_appends_to():
    seen = []

    def function(x):
        seen.append(1)
        return x * (1.0 if len(seen) < 12 else 2.0)

    return function


@moving
def an_iterator():
    numbers = iter([1.0] * 12 + [2.0] * 1000)
    return lambda x: x * next(numbers)


@moving
def a_count():
    numbers = itertools.count()
    return lambda x: x * next(numbers)


@moving
def a_cycle_of_five():
    numbers = itertools.cycle([1.0, 1.0, 1.0, 1.0, 2.0])
    return lambda x: x * next(numbers)


@moving
def a_generator():
    def numbers():
        factor = 1.0
        while True:
            yield factor
            factor += 1

    values = numbers()
    return lambda x: x * next(values)


@moving
def a_clock():
    return lambda x: x * (time.perf_counter() % 3)


@moving
def random_of_python():
    return lambda x: x * random.random()


@moving
def a_choice():
    return lambda x: x * random.choice([1.5, 2.5])


@moving
def a_generator_of_python():
    source = random.Random(3)
    return lambda x: x * (1.0 if source.random() < 0.999 else 2.0)


@moving
def random_of_numpy():
    return lambda x: x * float(np.random.rand())


@moving
def a_generator_of_numpy():
    source = np.random.default_rng(0)
    return lambda x: x * (1.0 if source.random() < 0.999 else 2.0)


@moving
def random_of_the_system():
    return lambda x: x * os.urandom(1)[0]


@moving
def a_value_of_the_rows():
    return lambda x: x * (1.5 if float(x.detach().sum()) > -1e9 else 2.5)


@moving
def a_number_of_rows_by_value():
    return lambda x: x[x.detach() > -1e9]


@moving
def a_seed_in_each_call():
    return seeded_dropout


@moving
def a_checkpoint_with_dropout():
    return lambda x: checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False)


@moving
def a_number_of_the_thread():
    local = threading.local()

    def function(x):
        local.factor = getattr(local, "factor", 0.0) + 1
        return x * local.factor

    return function
