"""State dicts under the module's own keys; engines that are nested, copied, pickled and saved."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)


class HasAModule(nn.Module):
    """Its own child is called ``module``: a prefix that must not be stripped."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs):
        return self.head(self.module(inputs).tanh())


class ModuleInModule(nn.Module):
    """``module.weight`` and ``module.module.weight`` are both its own."""

    def __init__(self):
        super().__init__()
        self.module = HasAModule()

    def forward(self, inputs):
        return self.module(inputs)


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def prefixed(state):
    return {f"module.{key}": value for key, value in state.items()}


FACTORIES = {
    "mlp": mlp,
    "child": lambda seed=0: build(HasAModule, seed),
    "child in child": lambda seed=0: build(ModuleInModule, seed),
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_keys_are_the_module_s(devices, factory):
    model = FACTORIES[factory]()
    engine = ScatterOnceParallel(model, 1, devices(2))
    assert list(engine.state_dict()) == list(model.state_dict())
    assert same(engine.state_dict(), model.state_dict())
    assert list(engine.state_dict(prefix="x.")) == [f"x.{key}" for key in model.state_dict()]


@pytest.mark.parametrize("rename", [dict, prefixed])
@pytest.mark.parametrize("factory", FACTORIES)
def test_loads_with_or_without_a_prefix(devices, factory, rename):
    other = FACTORIES[factory](seed=1)
    engine = ScatterOnceParallel(FACTORIES[factory](), 1, devices(2))
    assert not same(engine.state_dict(), other.state_dict())
    result = engine.load_state_dict(rename(other.state_dict()))
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same(engine.module.state_dict(), other.state_dict())


def test_loaded_weights_train(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        before = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        engine.load_state_dict(prefixed(mlp(seed=1).state_dict()))
        after = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    assert not torch.equal(before, after)


def test_checkpoints_of_data_parallel_go_both_ways(devices):
    saved = nn.DataParallel(mlp(seed=1)).state_dict()
    engine = ScatterOnceParallel(mlp(), 1, devices(2))
    engine.load_state_dict(saved)
    assert same(engine.state_dict(), mlp(seed=1).state_dict())
    mlp().load_state_dict(engine.state_dict())


def test_versions_of_layers_survive_the_prefix(devices):
    """A state dict's metadata tells a layer how old it is; its keys have prefixes too.

    Batch normalisation forgives a missing count of batches only in a dict of an old version.
    """
    engine = ScatterOnceParallel(build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES))))
    saved = nn.DataParallel(engine.module).state_dict()
    del saved["module.0.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.num_batches_tracked"'):
        engine.load_state_dict(saved)
    for versions in saved._metadata.values():
        versions["version"] = 1
    engine.load_state_dict(saved)


def test_missing_and_unexpected_keys_are_named_as_the_module_names_them(devices):
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


def test_load_by_assignment(devices):
    state = prefixed(mlp(seed=1).state_dict())
    with ScatterOnceParallel(mlp(), 1, devices(2)) as engine:
        engine.load_state_dict(state, assign=True)
        assert engine.module[0].weight.data_ptr() == state["module.0.weight"].data_ptr()
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_engine_as_a_child_of_another_module(devices, factory):
    """A parent saves and loads it under the keys that the bare model would have there."""

    def parent(child):
        return nn.ModuleDict({"backbone": child, "other": build(lambda: nn.Linear(2, 2))})

    bare = parent(FACTORIES[factory](seed=1))
    nested = parent(ScatterOnceParallel(FACTORIES[factory](), 1, devices(2)))
    assert list(nested.state_dict()) == list(bare.state_dict())
    for state in (bare.state_dict(), nested.state_dict()):
        result = nested.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
    assert same(nested.state_dict(), bare.state_dict())
    bare.load_state_dict(nested.state_dict())


def test_parameters_modes_and_devices_are_the_module_s(devices):
    model = mlp()
    engine = ScatterOnceParallel(model, 1, devices(2))
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(7)
    assert all((parameter == 7).all() for parameter in model.parameters())
    engine.eval()
    assert not model.training
    assert not model[0].training
    engine.train()
    assert model[0].training
    engine.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    engine.zero_grad()


def through_torch_save(engine):
    file = io.BytesIO()
    torch.save(engine, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda engine: pickle.loads(pickle.dumps(engine)),
    "torch.save": through_torch_save,
    "a list in a deepcopy": lambda engine: copy.deepcopy([engine])[0],
}


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_copies_work_and_share_nothing(devices, way, ran_before):
    engine = ScatterOnceParallel(mlp(), 2, devices(3), buffers="mean", check_finite=True)
    if ran_before:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    twin = COPIES[way](engine)
    assert twin.plan(9) == engine.plan(9)
    assert twin.buffers_from == "mean"
    with torch.no_grad():
        twin.module[0].weight.mul_(2)
    kept = engine.module[0].weight.grad
    kept = None if kept is None else kept.clone()
    assert_step(twin, *BATCH, nn.CrossEntropyLoss())
    now = engine.module[0].weight.grad
    assert (now is None) if kept is None else torch.equal(now, kept)
    assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    engine.close()
    assert_step(twin, *BATCH, nn.CrossEntropyLoss())
    with pytest.raises(FloatingPointError):
        twin.forward_backward(BATCH[0] * float("nan"), BATCH[1], nn.CrossEntropyLoss())
    twin.close()


def test_replicas_can_be_saved(devices):
    with ScatterOnceParallel(mlp(), 1, devices(2)) as engine:
        found = through_torch_save(list(engine.replicas))
        for one, other in zip(found, engine.replicas, strict=True):
            assert same(one.state_dict(), other.state_dict())


def test_the_module_alone_can_be_copied_after_steps(devices):
    """EMA libraries deep-copy the model in mid-training: nothing of the engine clings to it."""
    model = mlp()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        twin = copy.deepcopy(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        pickle.dumps(model)
    assert same(twin.state_dict(), model.state_dict())


def test_closing_ends_it_and_says_so(devices):
    engine = ScatterOnceParallel(mlp(), 2, devices(2))
    with engine as entered:
        assert entered is engine
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    engine.close()
    with pytest.raises(RuntimeError, match="engine is closed; make another"):
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    with pytest.raises(RuntimeError, match="engine is closed; make another"):
        engine.eval()(BATCH[0])
