"""What calls of a step function add to what its owner keeps."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from harness.models import Meter

from scatterpar.integrations.changes import KeptState, apply_changes, standing_in
from scatterpar.integrations.kept import CallCopies

CPU = torch.device("cpu")
VALUES = [1.0, 2.0, 4.0, 8.0]


class Owner:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def applied(owner, call, values=VALUES):
    """The places that were told, after calls with each of these values."""
    changes, told = [], []
    for value in values:
        copies = CallCopies(CPU)
        with standing_in(owner, (), copies, {}, in_place=False) as stand_in:
            state = KeptState(stand_in, ())
            call(stand_in, torch.tensor(value))
            changes.append(state.changes())
    apply_changes(owner, changes, CPU, told.append)
    return told


def add_to_set(owner, value):
    owner.kept |= {int(value)}


def add_number(owner, value):
    owner.kept += float(value)


def add_tensor(owner, value):
    owner.kept = owner.kept + value


def make_and_fill(owner, value):
    if owner.kept is None:
        owner.kept = defaultdict(list)
    owner.kept["a"].append(value)


class Losses(list):
    """Its ``copy`` is a plain list."""


TENSORS = [torch.tensor(value) for value in VALUES]
ADDED = {  # the owner's value before, the call, the value after all calls
    "list": ([], lambda o, v: o.kept.append(v), TENSORS),
    "list per loader": (
        [[], []],
        lambda o, v: o.kept[1].append(v),
        [[], TENSORS],
    ),
    "a new list": ([], lambda o, v: setattr(o, "kept", [*o.kept, v]), TENSORS),
    "dict of lists": (
        defaultdict(list),
        lambda o, v: o.kept["a"].append(v),
        {"a": TENSORS},
    ),
    "made in the call": (None, make_and_fill, {"a": TENSORS}),
    "nested": (
        {"a": {"b": [5]}},
        lambda o, v: o.kept["a"]["b"].extend([v, v]),
        {"a": {"b": [5, *(v for v in TENSORS for _ in range(2))]}},
    ),
    "ordered dict": (
        OrderedDict(a=[]),
        lambda o, v: o.kept["a"].append(v),
        {"a": TENSORS},
    ),
    "full deque": (
        deque([9, 9, 9], 3),
        lambda o, v: o.kept.append(v),
        deque(TENSORS[1:], 3),
    ),
    "set": ({1, 7}, add_to_set, {1, 2, 4, 7, 8}),
    "counter": (
        Counter({1: 1}),
        lambda o, v: o.kept.update([int(v), 3]),
        {1: 2, 2: 1, 4: 1, 8: 1, 3: 4},
    ),
    "number": (1, add_number, 16.0),
    "sum of tensors": (torch.tensor(1.0), add_tensor, torch.tensor(16.0)),
    "a number that becomes a tensor": (0.0, add_tensor, torch.tensor(15.0)),
    "tensor in place": (
        torch.zeros(()),
        lambda o, v: o.kept.add_(v),
        torch.tensor(15.0),
    ),
    "number in a dict": (
        {"a": 1.0},
        lambda o, v: o.kept.update(a=o.kept["a"] + float(v)),
        {"a": 16.0},
    ),
    "long list": (
        [0] * 5000,
        lambda o, v: o.kept.append(v),
        [*[0] * 5000, *TENSORS],
    ),
    "a namespace": (
        SimpleNamespace(rows=1, values=[]),
        lambda o, v: (
            o.kept.values.append(v) or vars(o.kept).update(rows=o.kept.rows + 2)
        ),
        SimpleNamespace(rows=9, values=TENSORS),
    ),
    "a dict of collections": (
        UserDict(rows=1),
        lambda o, v: o.kept.update(rows=o.kept["rows"] + 2),
        {"rows": 9},
    ),
    "a list of the user's class": (
        Losses([5]),
        lambda o, v: o.kept.append(v),
        Losses([5, *TENSORS]),
    ),
    "a switch": (False, lambda o, _: setattr(o, "kept", True), True),
}


@pytest.mark.parametrize("name", ADDED)
def test_values_added_in_order_of_calls(name):
    before, call, expected = ADDED[name]
    owner = Owner(kept=before)
    assert not applied(owner, call)
    assert owner.kept == expected


SET = {
    "a tensor": (None, lambda o, v: setattr(o, "kept", v)),
    "a tensor with rows": (torch.zeros(3), lambda o, v: o.kept.fill_(v)),
    "an entry": ({}, lambda o, v: o.kept.update(a=v)),
    "a list that is cleared": ([1, 2], lambda o, _: o.kept.clear()),
    "an entry that is removed": ({"a": 1}, lambda o, _: o.kept.pop("a")),
    "a list with another beginning": ([1], lambda o, v: o.kept.insert(0, v)),
    "text": ("", lambda o, v: setattr(o, "kept", str(v))),
}


@pytest.mark.parametrize("name", SET)
def test_values_set_told_by_name_and_stay(name):
    before, call = SET[name]
    owner = Owner(kept=before)
    contents = before.clone() if isinstance(before, torch.Tensor) else str(before)
    (place,) = applied(owner, call)
    assert place.startswith("self.kept")
    assert owner.kept is before
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, contents)
    else:
        assert str(before) == contents


def test_value_set_by_only_call_is_set():
    owner = Owner(kept=None)
    assert not applied(owner, lambda o, v: setattr(o, "kept", v), [3.0])
    assert owner.kept == torch.tensor(3.0)


def test_objects_copied_identity_stays():
    meter = Meter()
    owner = Owner(meter=meter, same=meter, values=meter.values)
    assert not applied(owner, lambda o, v: o.meter.update(v))
    assert owner.meter is owner.same is meter
    assert owner.values is meter.values
    assert (meter.total, meter.values) == (torch.tensor(15.0), TENSORS)


@pytest.mark.parametrize("same", [lambda kept: kept, lambda kept: [kept]])
def test_tensor_of_two_names_is_added_once(same):
    total = torch.tensor(1.0)
    owner = Owner(kept=total, same=same(total))
    assert not applied(owner, lambda o, v: o.kept.add_(v))
    assert owner.kept is total
    assert total == 16


def test_graphs_are_dropped():
    weight = torch.ones((), requires_grad=True)
    owner = Owner(kept=[])
    applied(owner, lambda o, v: o.kept.append(v * weight))
    assert [entry.requires_grad for entry in owner.kept] == [False] * 4


def test_pinned_objects_shared_and_restored():
    features = {"a": 1}
    owner = Owner(features=features)
    copies = CallCopies(CPU, pinned=frozenset([id(features)]))
    with standing_in(owner, (), copies, {}, in_place=False) as stand_in:
        assert stand_in.features is features
        features["b"] = 2
    assert features == {"a": 1}


def test_owner_in_place_restored_on_error():
    owner = Owner(a=[1], b=2)
    copies = CallCopies(CPU)

    def fail():
        with standing_in(owner, (), copies, {"c": 3}, in_place=True):
            assert (owner.a, owner.b, owner.c) == ([1], 2, 3)
            owner.a.append(5)
            owner.d = 4
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert vars(owner) == {"a": [1], "b": 2}
