"""Batches in containers and objects of the user's own: exact, or refused by name."""

from __future__ import annotations

import collections
import functools
import types
from dataclasses import dataclass, field

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of
from harness.oracle import assert_step, build, randint, randn
from harness.pairwise import pairwise
from torch import Tensor, nn

from scatterpar import Replicated, Rows, ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()


class Owned(list):
    def __init__(self, owner, items):
        super().__init__(items)
        self.owner = owner


class Two(tuple):
    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


class Point(collections.namedtuple("Point", "one, other")):
    def __new__(cls, both):
        return super().__new__(cls, both, both)


@dataclass
class Computed:
    inputs: Tensor

    @functools.cached_property
    def mask(self):
        return (self.inputs > 0).double()


@dataclass
class Late:
    inputs: Tensor
    mask: Tensor = field(init=False)


def computed():
    batch = Computed(ROWS)
    assert len(batch.mask) == 13  # as in a collate function
    return batch


def fills_a_field(batch):
    assert not hasattr(batch, "mask")
    batch.mask = batch.inputs > 0
    masked = batch.inputs * batch.mask
    del batch.mask
    return masked


class Columns(collections.abc.MutableMapping):
    """Its copies share what holds the columns."""

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, name):
        return self.columns[name]

    def __setitem__(self, name, column):
        self.columns[name] = column

    def __delitem__(self, name):
        del self.columns[name]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return len(self.columns)

    def doubled(self):
        return self.columns["inputs"] * 2


class ReadOnly(collections.abc.Mapping):
    def __init__(self, **columns):
        self.columns = columns

    __getitem__, __iter__ = Columns.__getitem__, Columns.__iter__
    __len__, doubled = Columns.__len__, Columns.doubled


class Bunch(dict):
    """Its items are its attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


def owned(batch):
    assert type(batch) is Owned
    assert batch.owner == "me"
    return batch[0] + batch[1]


EXACT = {
    "list with another constructor": (Owned("me", [ROWS, ROWS]), owned),
    "tuple with another constructor": (Two(ROWS, ROWS), lambda b: b[0] * b[1]),
    "named tuple with another": (Point(ROWS), lambda b: b.one + b.other),
    "mapping": (Columns(inputs=ROWS, scale=2.0), lambda b: b.doubled() * b["scale"]),
    "mapping that is read only": (ReadOnly(inputs=ROWS), lambda b: b.doubled()),
    "mapping proxy": (types.MappingProxyType({"x": ROWS}), lambda b: b["x"]),
    "items that are attributes": (Bunch(inputs=ROWS), lambda b: b.inputs * b["inputs"]),
    "cached property": (computed(), lambda b: b.inputs * b.mask),
    "field that is not set": (Late(ROWS), fills_a_field),
    "torch's own": (torch.max(ROWS[:, :, None], 2), lambda b: b.values),
    "object without rows": (
        (ROWS, types.SimpleNamespace(scale=2.0, shift=torch.ones(5).double())),
        lambda b: b[0] * b[1].scale + b[1].shift,
    ),
}


def reader(read):
    return build(
        lambda: Of(
            lambda m, batch: m.linear(read(batch)), linear=nn.Linear(FEATURES, CLASSES)
        )
    )


@pytest.mark.parametrize("case", EXACT)
def test_custom_container_is_exact(devices, case):
    batch, read = EXACT[case]
    with ScatterOnceParallel(reader(read), 4, devices(3)) as engine:
        for _ in range(2):  # the first step has not written the batch
            assert_step(engine, {"batch": batch}, LABELS, LOSS)


class Table(collections.abc.Mapping):
    """Iterates over rows, as a TensorDict."""

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, key):
        return self.columns[key]

    def __iter__(self):
        return iter(range(len(self)))

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def keys(self):
        return self.columns.keys()

    def to_dict(self):
        return dict(self.columns)


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


class Listed(list):
    """Keeps more about its rows than its items."""


def listed():
    batch = Listed([ROWS])
    batch.lengths = torch.ones(13)
    return batch


REFUSED = {
    "table": (Table(inputs=ROWS), TypeError, r"a Table iterates.*batch.to_dict\(\)"),
    "object": (
        types.SimpleNamespace(inputs=ROWS),
        ValueError,
        r"SimpleNamespace has tensors.*'inputs'.*a dict of them.*Replicated",
    ),
    "object in an object": (
        types.SimpleNamespace(batch=types.SimpleNamespace(inputs=[ROWS])),
        ValueError,
        "a SimpleNamespace has tensors.*'batch'",
    ),
    "slots": (Slotted(ROWS), ValueError, "a Slotted has tensors.*'rows'.*by name"),
    "deque": (collections.deque([ROWS]), ValueError, r"a deque.*list\(value\)"),
    "user's list": (collections.UserList([ROWS]), ValueError, r"UserList.*list\(value"),
    "view": ({"x": ROWS}.values(), ValueError, r"a dict_values.*list\(value\)"),
    "attribute beside the items": (listed(), ValueError, "Listed has.*'lengths'"),
}


# Made anew for each test, which looks whether anybody has read them.
READ_ONCE = {
    "generator": (lambda: (row for row in ROWS), "generator.*only once.*a list"),
    "iterator": (lambda: iter([2.0, 3.0]), "list_iterator.*only once"),
    "marked iterator": (lambda: Replicated(map(str, [1])), "'map'.*only once"),
}


@pytest.mark.parametrize("case", [*REFUSED, *READ_ONCE])
def test_unsplittable_value_refused_first(devices, case):
    if case in READ_ONCE:
        make, words = READ_ONCE[case]
        value, error = make(), ValueError
    else:
        value, error, words = REFUSED[case]
    model = reader(lambda _: pytest.fail("it ran"))
    for verify in (True, False):
        engine = ScatterOnceParallel(model, 4, devices(2), verify=verify)
        with engine, pytest.raises(error, match=words):
            engine.forward_backward((ROWS, value), LABELS, LOSS)
        with engine, pytest.raises((error, RuntimeError)):
            engine.loss(ROWS, (LABELS, value), LOSS)
    if case in READ_ONCE:
        assert next(iter(getattr(value, "contents", value)), None) is not None


def test_proposed_remedies_are_exact(devices):
    model = reader(lambda b: types.SimpleNamespace(**b).inputs)
    batch = types.SimpleNamespace(inputs=ROWS)
    with ScatterOnceParallel(model, 4, devices(2)) as engine:
        assert_step(engine, {"batch": vars(batch)}, LABELS, LOSS)
    rows = [types.SimpleNamespace(inputs=row) for row in ROWS]
    model = reader(lambda b: torch.stack([row.inputs for row in b]))
    with ScatterOnceParallel(model, 4, devices(2)) as engine:
        plain = {"batch": rows}, LABELS
        assert_step(engine, {"batch": Rows(rows)}, LABELS, LOSS, plain=plain)


def test_rnn_states_told_to_be_transposed(devices):
    states = randn(1, 13, 4), randn(1, 13, 4)

    def forward(m, inputs, states):
        states = [state.transpose(0, 1).contiguous() for state in states]
        return m.head(m.lstm(inputs, states)[0][:, -1])

    def make():
        lstm = nn.LSTM(FEATURES, 4, batch_first=True)
        return Of(forward, lstm=lstm, head=nn.Linear(4, CLASSES))

    model = build(make)
    inputs = randn(13, 6, FEATURES)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(
            ValueError, match=r"transpose\(0, 1\) .*recurrent layer"
        ) as error:
            engine.forward_backward((inputs, states), LABELS, LOSS)
        # 13 rows beside one are no views of it.
        assert "views" not in str(error.value)
        turned = [state.transpose(0, 1) for state in states]
        assert_step(engine, (inputs, turned), LABELS, LOSS)


def test_replicated_object_passed_whole(devices):
    shift = types.SimpleNamespace(value=torch.ones(13))
    model = reader(lambda b: b[0] * b[1].value.double().sum())
    with ScatterOnceParallel(model, 4, devices(2)) as engine:
        plain = {"batch": (ROWS, shift)}, LABELS
        batch = {"batch": (ROWS, Replicated(shift))}
        assert_step(engine, batch, LABELS, LOSS, plain=plain)


def test_graph_of_as_many_nodes_is_not_rows(devices):
    graph = types.SimpleNamespace(x=torch.ones(13, 2), edges=torch.zeros(2, 5))
    model = reader(lambda b: b[0] * b[1].x.double().mean())
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, {"batch": (ROWS, graph)}, LABELS, LOSS)


class Policy:
    """An object that no container is, with a distribution of its own."""

    def __init__(self, output):
        self.actions = {"first": torch.distributions.Independent(normal(output), 1)}


def normal(output):
    return torch.distributions.Normal(output, output.exp())


WITH_GRAPHS = {
    "a distribution": normal,
    "distributions in a list": lambda output: [1, normal(output)],
    "a distribution in a dict": lambda output: {"d": normal(output)},
    "an object that has one": Policy,
}


@pairwise(
    name=WITH_GRAPHS,
    select=[True, lambda output: output, lambda o: (o,)],
    quick={"select": [True]},
)
def test_returned_objects_have_no_graph(devices, name, select):
    """They came back with their graphs unless they were the whole output."""
    model = build(lambda: nn.Linear(FEATURES, CLASSES))

    def forward(net, rows):
        return WITH_GRAPHS[name](net.model(rows)), rows

    def loss(output, _):
        value = output[0]
        if isinstance(value, Policy):
            value = value.actions["first"]
        value = value[-1] if isinstance(value, list) else value
        value = value["d"] if isinstance(value, dict) else value
        return value.mean.mean()

    with ScatterOnceParallel(Of(forward, model=model), 2, devices(2)) as engine:
        with pytest.raises(TypeError, match="whose tensors have a graph"):
            engine.forward_backward(ROWS, None, loss, return_outputs=select)
        assert model.weight.grad is None
        _, rows = engine.forward_backward(
            ROWS, None, loss, return_outputs=lambda output: output[1]
        )
    assert torch.equal(torch.cat(rows), ROWS)
