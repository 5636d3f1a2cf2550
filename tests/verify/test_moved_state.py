"""State that each call of a module moves, found by name."""

from __future__ import annotations

import collections
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.nested import PLAIN
from scatterpar.objects.snapshot import entries_of
from scatterpar.objects.walk import Place, Walk
from scatterpar.verify.moved_state import moved_between, state_of


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("entries", torch.zeros(2))
        self.register_buffer("nothing", None)
        self.calls = 0
        self.last = torch.ones(1)
        self.name = "queue"


def replicas(module):
    return [SimpleNamespace(root=module), SimpleNamespace(root=len)]


def test_buffers_and_attributes_named():
    outer = nn.Module()
    outer.inner = Queue()
    names = {"the buffer 'inner.entries'", "the attribute 'inner.calls'"}
    assert state_of(replicas(outer)).keys() == names | {"the attribute 'inner.last'"}
    assert state_of(replicas(Queue()), has_same_rows=True).keys() == {
        "the attribute 'calls'",
        "the attribute 'last'",
        "the attribute 'name'",
    }


MOVES = {
    "switch": (False, lambda m: not m.kept),
    "word": ("a", lambda m: m.kept + "a"),
    "dictionary": ({"calls": 0}, lambda m: {"calls": m.kept["calls"] + 1}),
    "count": (collections.Counter(), lambda m: m.kept + collections.Counter("a")),
    "tuple": ((), lambda m: (*m.kept, 1)),
    "set": (set(), lambda m: m.kept | {len(m.kept)}),
    "lists in a dictionary": ({"loss": []}, lambda m: {"loss": [*m.kept["loss"], 1]}),
    "states of an LSTM": (
        (torch.zeros(2), torch.zeros(2)),
        lambda m: tuple(state + 1 for state in m.kept),
    ),
    "made in forward": (None, lambda m: (m.kept or 0) + 1),
}


@pytest.mark.parametrize("sub_steps", [1, 2])
@pytest.mark.parametrize("case", MOVES)
def test_moved_attribute_told_by_name(case, sub_steps):
    initial, move = MOVES[case]

    def forward(model, inputs):
        model.kept = move(model)
        return model.linear(inputs)

    model = Of(forward, linear=linear(), kept=initial)
    inputs = randn(8, FEATURES)
    with (
        ScatterOnceParallel(model, 1, ["cpu"] * sub_steps) as engine,
        pytest.warns(UserWarning, match="forward passes move the attribute 'kept'"),
    ):
        engine.forward_backward(inputs, randn(8, CLASSES), nn.MSELoss())


class Numbered(nn.Module):
    """A criterion with the position of its queue."""

    def __init__(self):
        super().__init__()
        self.position = 0

    def forward(self, output, targets):
        self.position += 1
        return nn.functional.mse_loss(output, targets)


@pytest.mark.parametrize("options", [{}, {"whole_batch": True}], ids=["", "whole"])
def test_moved_attribute_of_criterion_told(options):
    """It began with its first value in each step, in silence."""
    inputs, targets = randn(8, FEATURES), randn(8, CLASSES)
    with (
        ScatterOnceParallel(linear(), 1, ["cpu"] * 2) as engine,
        pytest.warns(UserWarning, match="move the attribute 'position': each"),
    ):
        engine.forward_backward(inputs, targets, Numbered(), **options)


CONSTANT = {
    "switch": lambda x: True,
    "cache by size": lambda x: {x.size(1): torch.ones(x.size(1))},
    "features": lambda x: [x.detach().clone()],
}


@pytest.mark.parametrize("case", CONSTANT)
def test_equal_attribute_not_told(case):
    def forward(model, inputs):
        model.kept = CONSTANT[case](inputs)
        return model.linear(inputs)

    model = Of(forward, linear=linear(), kept=None)
    with (
        ScatterOnceParallel(model, 1, ["cpu"]) as engine,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        engine.forward_backward(randn(8, FEATURES), randn(8, CLASSES), nn.MSELoss())


def test_state_values_are_copies():
    queue = Queue()
    before = state_of(replicas(queue))
    queue.entries += 1
    queue.calls += 1
    after = state_of(replicas(queue))
    (entries,) = before["the buffer 'entries'"].values()
    assert entries.tolist() == [0, 0]
    assert moved_between([before, after]) == [
        "the buffer 'entries'",
        "the attribute 'calls'",
    ]


def test_tensor_with_graph_is_no_state():
    queue = Queue()
    queue.last = torch.ones(1, requires_grad=True) * 2
    assert "the attribute 'last'" not in state_of(replicas(queue))


@pytest.mark.parametrize(
    ("first", "second", "is_moved"),
    [
        (1, 2, True),
        (1, 1, False),
        (math.nan, math.nan, False),
        (1, 1.5, False),  # of another type: nothing is compared
        (torch.ones(2), torch.ones(2), False),
        (torch.zeros(1), -torch.zeros(1), True),  # other bits
    ],
)
def test_only_values_of_one_type_compared(first, second, is_moved):
    states = [{"x": {(): first}}, {"x": {(): second}}]
    assert moved_between(states) == ["x"] * is_moved


def test_one_state_has_not_moved():
    assert moved_between([{"x": {(): 1}}]) == []


# --- values that a captured graph has frozen ---

SCALE = 2.0
OPTIONS = {"inner": [1, {"deep": 3}]}


class Held:
    def __init__(self):
        self.value = 5
        self.itself = self

    def method(self, output, targets):
        return output * self.value

    def __call__(self, output, targets):
        return output * SCALE


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.held = Held()

    def forward(self, rows):
        return self.layer(rows) * OPTIONS["inner"][0]


def closed(value):
    return lambda output, targets: output * value


def by_global(output, targets):
    return output * SCALE + OPTIONS["inner"][0]


class Hostile:
    @property
    def __dict__(self):
        raise RuntimeError("on purpose")


def plain_values(walk):
    """The plain values to which roots lead, by the names that a walk gives them."""
    places = [place for place in walk.places if type(place.value) in PLAIN]
    for number, kind, container in walk.containers:
        for key, value in entries_of(container):
            if type(value) in PLAIN:
                places.append(Place(kind, container, key, value, number))
    return {walk.name_of_place(place): place.value for place in places}


@pytest.mark.parametrize(
    ("root", "name", "value"),
    [
        (by_global, "SCALE", 2.0),
        (by_global, "OPTIONS['inner'][1]['deep']", 3),
        (closed(7), "value", 7),
        (Held(), "value", 5),
        (Held(), "SCALE", 2.0),
        (Held().method, "self.value", 5),
        (Scaled(), "held.value", 5),
        (Scaled(), "OPTIONS['inner'][0]", 1),
    ],
)
def test_value_named_as_it_is_read(root, name, value):
    assert plain_values(Walk([root]))[name] == value


def test_unreadable_object_left_out():
    assert plain_values(Walk([[Hostile(), 3]])) == {"[1]": 3}
