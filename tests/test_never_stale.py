"""Whatever the user does to the module between two steps is obeyed by the next."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.changes import CHANGES, Model, freeze, freeze_and_thaw, transpose_strides
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_next_step_obeys(devices, change):
    model = build(Model)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        before = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        model.zero_grad()
        change(model)
        after = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        again = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    no_effect_on_the_loss = {freeze, freeze_and_thaw, transpose_strides}
    assert torch.equal(after, again)
    assert (change in no_effect_on_the_loss) == torch.equal(before, after)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_inference_obeys_too(devices, change):
    model = build(Model).eval()
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        engine(BATCH[0])
        change(model)
        expected = copy.deepcopy(model)(BATCH[0]).detach()
        assert_close(engine(BATCH[0]), expected, "output")


def test_hooks_that_are_taken_off_are_gone(devices):
    model = mlp()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        plain = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
        hooked = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        handle.remove()
        again = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    assert torch.equal(plain, again)
    assert not torch.equal(plain, hooked)


def test_train_and_eval_of_submodules(devices):
    model = build(
        lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    )
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(module.training))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.train()
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        model[1].eval()
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert [replica.training for replica in engine.replicas] == [True, True]
        engine.eval()
        engine(BATCH[0])
        model[1].train()
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert seen == [True, True, False, False, False, False, True, True]
    assert model[1].num_batches_tracked == 2


def test_module_to_another_dtype_and_back(devices):
    model = mlp()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        model.zero_grad()
        model.float()
        loss = assert_step(engine, BATCH[0].float(), BATCH[1], nn.CrossEntropyLoss(), relative=1e-5)
        assert loss.dtype == torch.float32
        model.zero_grad()
        model.double()
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


def test_another_module_in_the_engine(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        first = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        engine.module = mlp(seed=3)
        second = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    assert not torch.equal(first, second)


def test_replicas_are_those_of_now(devices):
    model = mlp()
    with ScatterOnceParallel(model, 1, devices(3)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        model[0].weight.data.fill_(4)
        assert len(engine.replicas) == 3
        for replica in engine.replicas:
            assert (replica[0].weight == 4).all()
            assert replica is not model


def test_a_criterion_that_changes(devices):
    criterion = nn.CrossEntropyLoss(weight=torch.ones(CLASSES).double())
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        first = assert_step(engine, *BATCH, criterion)
        criterion.weight[0] = 9
        second = assert_step(engine, *BATCH, criterion)
        criterion.weight = torch.tensor([0.1, 0.2, 0.3, 4.0]).double()
        third = assert_step(engine, *BATCH, criterion)
        criterion.label_smoothing = 0.3
        fourth = assert_step(engine, *BATCH, criterion)
    assert len({loss.item() for loss in (first, second, third, fourth)}) == 4


def test_what_a_forward_leaves_behind_does_not_outlive_the_step(devices):
    """Attributes that a forward sets on a replica are that step's; the master's rule the next."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)
            self.calls = 0
            self.cache = []

        def forward(self, inputs):
            self.calls += 1
            self.cache.append(inputs)
            return self.linear(inputs) * (1.0 if self.calls == 1 and len(self.cache) == 1 else 9.0)

    model = build(Remembers)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for _ in range(3):
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    assert model.calls == 0
    assert model.cache == []
