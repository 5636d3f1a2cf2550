"""Whatever the user does to the module between two steps is obeyed by the next."""

from __future__ import annotations

import copy
from operator import is_

import pytest
import torch
from helpers.changes import CHANGES, Model, freeze, freeze_and_thaw, transpose_strides
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, assert_step, build, randint, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

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


# A forward pass that leaves the Parameter in place and exchanges its storage. The replica stayed
# where that pass had left it, and trained on the weights of the first step for ever.


def set_storage(parameter):
    with torch.no_grad():
        parameter.set_(parameter.clone())


def rebind_data_of(parameter):
    parameter.data = parameter.data.clone()


class Flattens(nn.Module):
    """What ``flatten_parameters`` does on an accelerator, on any device."""

    def __init__(self, exchange):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 4, num_layers=2)
        self.head = nn.Linear(4, CLASSES)
        self.exchange = exchange

    def forward(self, inputs):
        for parameter in self.parameters():
            self.exchange(parameter)
        return self.head(self.lstm(inputs[None])[0][0])


EXCHANGES = [set_storage, rebind_data_of]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
def test_storage_that_a_forward_exchanges_does_not_freeze_the_weights(devices, exchange):
    model = build(lambda: Flattens(exchange))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(assert_step(engine, *BATCH, nn.CrossEntropyLoss()).item())
            optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
def test_the_pair_lets_a_forward_exchange_storage(devices, exchange):
    """It raised "Output 0 of _Attach is a view and its base or another view ... inplace"."""
    model = build(lambda: Flattens(exchange))
    plain = copy.deepcopy(model)
    pair = DataParallelModel(model, devices(2))
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    for _ in range(3):
        criterion(pair(BATCH[0]), BATCH[1]).backward()
        nn.functional.cross_entropy(plain(BATCH[0]), BATCH[1]).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(one.grad, other.grad, "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_buffer_whose_storage_a_forward_exchanges(devices):
    """A buffer that a forward pass lets grow could not be refreshed in the next step."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)
            self.register_buffer("seen", torch.ones(1))

        def forward(self, inputs):
            self.seen.data = torch.cat([self.seen, self.seen.new_ones(1)])
            return self.linear(inputs) * len(self.seen)

    model = build(Grows)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for size in (2, 3, 4):
            model.zero_grad()
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())
            assert len(model.seen) == size


def test_a_rebound_parameter_is_followed_without_building_anew(devices):
    """Its address says nothing: an allocator gives the same one to other weights again."""
    model = mlp()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        replicas = engine.replicas
        for seed in range(3):
            model.zero_grad()
            model[0].weight.data = randn(*model[0].weight.shape, seed=seed)
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        assert all(map(is_, replicas, engine.replicas))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_weights_lie_as_cudnn_wants_them(bidirectional, bias):
    """Matrices, then biases, from the start of a storage: elsewhere each pass copies them."""
    model = build(
        lambda: nn.ModuleList(
            [
                nn.LSTM(5, 3, 2, bias=bias, bidirectional=bidirectional),
                nn.GRU(3, 2, bias=bias),
                nn.Linear(3, 3),
            ]
        )
    )
    with ScatterOnceParallel(model, 1, ["cpu:0", "cpu:1"]) as engine:
        for layer in engine.replicas[1][:2]:
            weights = sorted(layer.named_parameters(), key=lambda item: "bias" in item[0])
            start = weights[0][1].untyped_storage().data_ptr()
            for _, weight in weights:
                assert weight.data_ptr() == start
                start += weight.numel() * weight.element_size()
        for one, other in zip(*[r.parameters() for r in engine.replicas], strict=True):
            assert torch.equal(one, other)


def test_what_a_forward_pass_freezes_trains_again(devices):
    """Its evaluation turns gradients off; the user turns them on, where the master's never went."""

    class Freezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(FEATURES, FEATURES)
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs):
            if not self.training:
                self.body.requires_grad_(False)
            return self.head(self.body(inputs))

    model = build(Freezes)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        model.eval()
        engine(BATCH[0])
        model.train().requires_grad_(True)
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        assert model.body.weight.grad is not None
