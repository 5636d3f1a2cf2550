"""References that lead to a replica for the time of a call, and what the call leaves."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections import deque

import pytest
import torch
from harness.models import FEATURES
from harness.oracle import seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.loops.lending import (
    CopiesOnReplica,
    Lending,
    LentCopies,
    ModulePairs,
    copy_on_replica,
    loan_of,
    modules_of,
)
from scatterpar.loops.modules import Modules

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


def copied_pair():
    """An owner, and its modules with those of a replica."""
    owner = Owner()
    replica = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 1))
    teacher = nn.Linear(FEATURES, 1)
    return owner, [(owner.model, replica), (TEACHER, teacher)]


def lent_pair(owner=None):
    """An owner, and the loan of the second replica of its modules."""
    owner = Owner() if owner is None else owner
    modules = Modules([("Model", owner.model), ("Teacher", TEACHER)])
    engine = ScatterOnceParallel(modules, device_ids=["cpu"] * 2)
    second = engine.replicas[1]
    return owner, loan_of(engine.present_replicas, second)


def lending_of(owner, **options):
    return Lending(lambda: [owner], (), HOME, **options)


def tensors_of(value):
    return [*value.parameters()] if isinstance(value, nn.Module) else [value]


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_leads_to_replicas_tensors_in_call(name):
    """A module stays the user's, and has the replica's parameters."""
    refer, read = REFERENCES[name]
    owner, loan = lent_pair()
    owner.reference = refer(owner.model)
    referent = read(owner.reference)
    originals = tensors_of(referent)
    copies = [loan.of_replica()[id(original)] for original in originals]
    lending = lending_of(owner)
    for _ in range(2):
        with lending.lent(loan, HOME):
            found = read(owner.reference)
            assert isinstance(found, nn.Parameter) or found is referent
            assert all(map(operator.is_, tensors_of(found), copies))
        assert read(owner.reference) is referent
        assert all(map(operator.is_, tensors_of(referent), originals))
    if name in COPIED:
        owner, pairs = copied_pair()
        owner.reference = refer(owner.model)
        expected = ModulePairs(pairs).of_replica()[id(read(owner.reference))]
        assert read(copy_on_replica(owner, pairs).reference) is expected


def test_global_variable_leads_to_replicas_tensors():
    owner, loan = lent_pair()
    weight = TEACHER.weight
    with lending_of(owner).lent(loan, HOME):
        assert owner.step() is owner.teacher is TEACHER
        assert TEACHER.weight is loan.of_replica()[id(weight)]
    assert TEACHER.weight is weight


def test_writes_stay_and_tensors_of_replica_do_not():
    owner, loan = lent_pair()
    owner.losses = []
    owner.helper = Helper(None)
    model = owner.model
    weights = [model[0].weight, model[1].weight]
    with lending_of(owner).lent(loan, HOME):
        owner.losses.append(1.0)
        owner.best = owner.model
        owner.helper.model = [owner.model[0], owner.model[1].weight]
        owner.by_weight = {owner.model[0].weight: 1}
        owner.teacher = None
        model.bound = [model[0].weight, (model[1].weight,)]
    assert owner.losses == [1.0]
    assert owner.best is owner.model is model
    assert owner.helper.model[0] is model[0]
    assert owner.helper.model[1] is weights[1]
    assert [*owner.by_weight] == [weights[0]]
    assert model.bound[0] is weights[0]
    assert model.bound[1][0] is weights[1]
    assert owner.teacher is None


def test_references_restored_if_call_raises():
    owner, loan = lent_pair()
    weight = owner.model[0].weight

    def call():
        with lending_of(owner).lent(loan, HOME):
            owner.calls = 1
            raise KeyError

    with pytest.raises(KeyError):
        call()
    assert owner.model[0].weight is weight
    assert owner.calls == 1


def test_optimizer_answers_for_replicas_parameters():
    owner, loan = lent_pair()
    optimizer = torch.optim.SGD(owner.model.parameters(), 0.1, momentum=0.9)
    owner.model(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
    before = [*optimizer.state]
    lending = lending_of(owner, optimizers=lambda: [optimizer])
    with lending.lent(loan, HOME):
        for parameter in owner.model.parameters():
            assert "momentum_buffer" in optimizer.state[parameter]
            parameters = optimizer.param_groups[0]["params"]
            assert any(parameter is other for other in parameters)
    assert all(map(operator.is_, optimizer.state, before))
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], before))


def test_module_is_called_as_before_after_the_step():
    owner, loan = lent_pair()
    before = {*vars(owner.model[0])}
    lending = lending_of(owner)
    with lending.lent(loan, HOME):
        copied = copy.deepcopy(owner.model)
    lending.end_step()
    assert {*vars(owner.model[0])} == {*vars(copied[0])} == before


def test_rebound_attributes_are_the_users():
    owner, loan = lent_pair()
    model = owner.model
    model.tau = 4.0
    lending = lending_of(owner)
    for _ in range(2):
        with lending.lent(loan, HOME):
            owner.model.tau *= 0.5
            model[0].features = torch.zeros(2)
            model[1] = nn.Linear(2, 1).requires_grad_(False)
    assert model.tau == 1.0
    assert len(model[0].features) == 2
    assert not model[1].weight.requires_grad


def test_modules_of_owner_without_those_of_globals():
    owner = Owner()
    del owner.teacher
    owner.more = {"head": nn.Linear(1, 1)}
    assert modules_of(owner) == [owner.model, owner.more["head"]]
    assert modules_of(owner, {"more"}) == [owner.model]


def test_copy_shares_what_leads_to_no_part():
    owner, pairs = copied_pair()
    owner.losses = [1.0]
    owner.models = {"one": owner.model}
    owner.kept = owner.model
    owner.data = [owner.model] * 2000
    copied = copy_on_replica(owner, pairs, {"kept"})
    assert copied.losses is owner.losses
    assert copied.data is owner.data
    assert copied.models == {"one": copied.model} != owner.models
    assert copied.kept is owner.model
    assert copy_on_replica(owner.model, pairs) is copied.model


def test_copies_follow_the_owner():
    """What is searched once would be what the owner was before."""
    owner, pairs = copied_pair()
    owner.number = 1
    owner.models = [owner.model]
    owner.others = []
    copies = CopiesOnReplica(owner, pairs)
    first = copies.copy()
    first.number = 5
    owner.models.clear()
    owner.others.append(owner.model)
    second = copies.copy()
    assert second.number == 1
    assert second.models is owner.models
    assert second.others == [first.model]
    owner.number, owner.model = 2, None
    third = copies.copy()
    assert (third.number, third.model) == (2, None)


ELSEWHERE = torch.device("meta")


def write_original(tensor, copied):
    tensor.add_(1)


def write_copy(tensor, copied):
    copied.add_(1)


@pytest.mark.parametrize("change", [write_original, write_copy])
def test_lent_copy_is_kept_until_written(change):
    """Each copy between GPUs makes both wait for each other."""
    copies = LentCopies()
    tensor = torch.ones(2)
    copied = copies.of(tensor, ELSEWHERE)
    assert copies.of(tensor, ELSEWHERE) is copied
    assert copies.of(torch.ones(2), ELSEWHERE) is not copied
    change(tensor, copied)
    again = copies.of(tensor, ELSEWHERE)
    assert again is not copied
    assert copies.of(tensor, ELSEWHERE) is again


def test_lent_copy_is_dropped_with_its_place():
    """A call may leave a new tensor in each turn: memory would grow."""
    copies = LentCopies()
    tensors = [torch.ones(2), torch.ones(2)]
    first, second = [copies.of(tensor, ELSEWHERE) for tensor in tensors]
    copies.drop_others(tensors[1:], ELSEWHERE)
    assert copies.of(tensors[1], ELSEWHERE) is second
    assert copies.of(tensors[0], ELSEWHERE) is not first


def test_lent_copies_of_inference_tensors_are_not_kept():
    """No version tells that they were written."""
    copies = LentCopies()
    with torch.inference_mode():
        tensor = torch.ones(2)
    copied = copies.of(tensor, ELSEWHERE)
    assert copies.of(tensor, ELSEWHERE) is not copied
