"""State dicts under the module's own keys; wrappers that are nested, copied, pickled
and saved.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from harness.agree import BATCH
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import assert_step, build
from harness.pairwise import pairwise
from pair.common import Pair
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread_an_operation")]


def module_in_module():
    """Its own children are called ``module``: a prefix that must not be stripped."""
    return Of(
        None, module=Of(None, module=nn.Linear(FEATURES, 6), head=nn.Linear(6, CLASSES))
    )


def same(one, other):
    return list(one) == list(other) and all(
        torch.equal(one[key], other[key]) for key in one
    )


def prefixed(state):
    return {f"module.{key}": value for key, value in state.items()}


FACTORIES = {
    "mlp": mlp,
    "child in child": lambda seed=0: build(module_in_module, seed),
}
each_factory = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
each_wrapper = pytest.mark.parametrize(
    "wrapper", [ScatterOnceParallel, DataParallelModel, DataParallelCriterion]
)


def load(module, state):
    result = module.load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys


@pytest.mark.contract
@each_factory
@each_wrapper
def test_keys_load_with_or_without_prefix(devices, wrapper, make):
    wrapped = wrapper(make(), device_ids=devices(2))
    assert list(wrapped.state_dict(prefix="x.")) == [
        f"x.{key}" for key in make().state_dict()
    ]
    for seed, rename in enumerate((dict, prefixed), 1):
        state = make(seed=seed).state_dict()
        assert not same(wrapped.state_dict(), state)
        load(wrapped, rename(state))
        assert same(wrapped.state_dict(), state)
        assert same(wrapped.module.state_dict(), state)


@each_factory
@each_wrapper
def test_child_has_keys_of_bare_module(devices, wrapper, make):
    """A parent saves and loads it under the keys that the bare model
    would have there.
    """

    def parent(child):
        return nn.ModuleDict(
            {"backbone": child, "other": build(lambda: nn.Linear(2, 2))}
        )

    bare, nested = parent(make(seed=1)), parent(wrapper(make(), device_ids=devices(2)))
    assert list(nested.state_dict()) == list(bare.state_dict())
    # One that was saved with ``nn.DataParallel`` there has keys ``backbone.module.…``.
    for saved in (bare, parent(nn.DataParallel(make(seed=1)))):
        nested["backbone"].module.load_state_dict(make(seed=2).state_dict())
        load(nested, saved.state_dict())
        assert same(nested.state_dict(), bare.state_dict())
    for module in (nested, bare):
        load(module, nested.state_dict())


@each_wrapper
def test_parameters_and_modes_of_the_module(devices, wrapper):
    model = mlp()
    wrapped = wrapper(model, device_ids=devices(2))
    assert all(
        one is other
        for one, other in zip(wrapped.parameters(), model.parameters(), strict=True)
    )
    for is_on in (False, True):
        wrapped.train(is_on).requires_grad_(is_on).zero_grad()
        assert model.training == model[0].training == is_on
        assert {p.requires_grad for p in model.parameters()} == {is_on}


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_train(devices, assign):
    state = prefixed(mlp(seed=1).state_dict())
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        before = assert_step(engine, *BATCH, cross_entropy)
        engine.load_state_dict(state, assign=assign)
        with torch.no_grad():  # by assignment the module has the tensors of the dict
            state["module.0.weight"].zero_()
        assert (not engine.module[0].weight.any()) == assign
        after = assert_step(engine, *BATCH, cross_entropy)
    assert not torch.equal(before, after)


def test_missing_keys_named_as_by_module(devices):
    engine = ScatterOnceParallel(mlp(), 1, devices(2))
    state = prefixed(mlp().state_dict())
    del state["module.0.weight"]
    state["module.stranger"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.weight"') as caught:
        engine.load_state_dict(state)
    assert '"stranger"' in str(caught.value)
    result = engine.load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.weight"]
    assert result.unexpected_keys == ["stranger"]


def through_torch_save(wrapper):
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "torch.save": through_torch_save}


def check(one):
    if isinstance(one, Pair):
        one.check(*BATCH)
    else:
        assert_step(one, *BATCH, cross_entropy)


@pairwise(way=COPIES, kind=["engine", "pair"], quick={"way": ["torch.save"]})
def test_copies_work_and_share_nothing(devices, way, kind):
    """Made of what has not run yet, and of what has."""
    if kind == "pair":
        one = Pair(mlp(), cross_entropy, devices(3))
    else:
        one = ScatterOnceParallel(mlp(), 2, devices(3), check_finite=True)
    twins = [COPIES[way](one)]
    check(one)
    twins.append(COPIES[way](one))
    for twin in twins:
        with torch.no_grad():
            twin.module[0].weight.mul_(2)
        kept = one.module[0].weight.grad.clone()
        check(twin)
        assert torch.equal(one.module[0].weight.grad, kept)
        check(one)
        if kind == "engine":
            with twin, pytest.raises(FloatingPointError):
                twin.forward_backward(BATCH[0] * float("nan"), BATCH[1], cross_entropy)


def test_module_copied_after_steps(devices):
    """EMA libraries deep-copy the model in mid-training: nothing of the engine clings
    to it.
    """
    model = mlp()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, cross_entropy)
        for replica in through_torch_save(list(engine.replicas)):
            assert same(replica.state_dict(), model.state_dict())
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert same(twin.state_dict(), model.state_dict())
