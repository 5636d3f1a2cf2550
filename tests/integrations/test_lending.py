"""References that lead to a replica for the time of a call, and what the call leaves."""

from __future__ import annotations

import functools
import types
from collections import deque

import pytest
import torch
from harness.models import FEATURES
from harness.oracle import seeded
from torch import nn

from scatterpar.integrations.lending import (
    Lending,
    Parts,
    copy_on_replica,
    modules_of,
)

pytestmark = pytest.mark.draws
HOME = torch.device("cpu")
with seeded():
    TEACHER = nn.Linear(FEATURES, 1)  # a global variable that a method names


class Helper:
    def __init__(self, model):
        self.model = model

    def read(self):
        return self.model


class Owner:
    """As a Trainer: it refers to modules in all ways."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 1))
        self.teacher = TEACHER

    def step(self):
        return TEACHER


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model


def closure_over(model):
    return lambda: model


REFERENCES = {  # how an owner refers to its model, and how a call reads the reference
    "attribute": (lambda m: m, lambda r: r),
    "a part": (lambda m: m[1], lambda r: r),
    "a parameter": (lambda m: m[0].weight, lambda r: r),
    "list": (lambda m: [0, m], lambda r: r[1]),
    "dict of dicts": (lambda m: {"a": {"b": m}}, lambda r: r["a"]["b"]),
    "tuple": (lambda m: (m, 1), lambda r: r[0]),
    "tuple in a list": (lambda m: [(0, (m,))], lambda r: r[0][1][0]),
    "deque": (lambda m: deque([m]), lambda r: r[0]),
    "an object": (Helper, lambda r: r.model),
    "a slot": (Slotted, lambda r: r.model),
    "a namespace": (lambda m: types.SimpleNamespace(m=m), lambda r: r.m),
    "partial": (lambda m: functools.partial(max, m), lambda r: r.args[0]),
    "keyword": (lambda m: functools.partial(max, key=m), lambda r: r.keywords["key"]),
    "bound method": (lambda m: m.forward, lambda r: r.__self__),
    "closure": (closure_over, lambda r: r()),
    "a method's object": (lambda m: Helper(m).read, lambda r: r()),
}
# What libraries refer to modules by: a copy of an owner exchanges no others.
COPIED = {"attribute", "a part", "a parameter", "list", "tuple"}


def pair():
    """An owner, and its modules with those of a replica."""
    owner = Owner()
    replica = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 1))
    teacher = nn.Linear(FEATURES, 1)
    return owner, Parts([(owner.model, replica), (TEACHER, teacher)])


def lending_of(owner):
    return Lending(lambda: [owner], (), HOME)


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_leads_to_replica_in_call(name):
    refer, read = REFERENCES[name]
    owner, parts = pair()
    owner.reference = refer(owner.model)
    original = read(owner.reference)
    expected = parts.of_replica()[id(original)]
    lending = lending_of(owner)
    for _ in range(2):
        with lending.lent(parts, HOME):
            assert read(owner.reference) is expected
            assert owner.model is parts.of_replica()[id(parts.modules[0][0])]
        assert read(owner.reference) is original
    if name in COPIED:
        assert read(copy_on_replica(owner, parts).reference) is expected
        assert read(owner.reference) is original


def test_global_variable_leads_to_replica_in_call():
    owner, parts = pair()
    with lending_of(owner).lent(parts, HOME):
        assert (
            owner.step()
            is owner.teacher
            is parts.of_replica()[id(parts.modules[-1][0])]
        )
    assert owner.step() is owner.teacher
    assert TEACHER is parts.modules[-1][0]


def test_writes_stay_and_parts_of_replica_do_not():
    owner, parts = pair()
    owner.losses = []
    owner.helper = Helper(None)
    model = owner.model
    with lending_of(owner).lent(parts, HOME):
        owner.losses.append(1.0)
        owner.best = owner.model
        owner.helper.model = [owner.model[0], owner.model[1].weight]
        owner.teacher = None
    assert owner.losses == [1.0]
    assert owner.best is owner.model is model
    assert owner.helper.model[0] is model[0]
    assert owner.helper.model[1] is model[1].weight
    assert owner.teacher is None


def test_references_restored_if_call_raises():
    owner, parts = pair()
    model = owner.model

    def call():
        with lending_of(owner).lent(parts, HOME):
            owner.calls = 1
            raise KeyError

    with pytest.raises(KeyError):
        call()
    assert owner.model is model
    assert owner.calls == 1


def test_rebound_attributes_reach_users_modules():
    """``model.tau`` was set on a replica, and the user's module kept the old value."""
    owner = Owner()
    owner.model.tau = 5.0
    owner.model[1].scale = 1
    replicas = []
    for _ in range(2):
        replica = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 1))
        replica.tau = 5.0
        replica[1].scale = 1
        replicas.append(Parts([(owner.model, replica)]))
    lending = lending_of(owner)
    for parts in replicas * 2:
        with lending.lent(parts, HOME):
            owner.model.tau *= 0.5
            owner.model[1].scale += 1
            owner.model[0].features = torch.zeros(2)  # no plain value
    assert (owner.model.tau, owner.model[1].scale) == (5.0, 1)
    lending.end_step()
    # as with gradient accumulation: each call reads what the one before has set
    assert (owner.model.tau, owner.model[1].scale) == (5.0 / 16, 5)
    assert not hasattr(owner.model[0], "features")
    owner.model.tau = 3.0
    lending.end_step()
    assert owner.model.tau == 3.0


def test_modules_of_owner_without_those_of_globals():
    owner = Owner()
    del owner.teacher
    owner.more = {"head": nn.Linear(1, 1)}
    assert modules_of(owner) == [owner.model, owner.more["head"]]
    assert modules_of(owner, {"more"}) == [owner.model]


def test_copy_shares_what_leads_to_no_part():
    owner, parts = pair()
    owner.losses = [1.0]
    owner.models = {"one": owner.model}
    owner.kept = owner.model
    owner.data = [owner.model] * 2000
    copy = copy_on_replica(owner, parts, {"kept"})
    assert copy.losses is owner.losses
    assert copy.data is owner.data
    assert copy.models == {"one": copy.model} != owner.models
    assert copy.kept is owner.model
    assert copy_on_replica(owner.model, parts) is copy.model
