"""Whatever the user does to the module between two steps is obeyed by the next."""

from __future__ import annotations

import copy

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


def test_numbers_and_flags_that_schedules_turn(devices):
    """Replicas take them over as they are; anything else in their place is built anew."""

    class Scales(nn.Linear):
        scale = None

        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs if self.scale is None else outputs * self.scale

    model = build(lambda: Scales(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        losses = []
        for model.scale in (1, 0.5, 0.25, True, None, 0.25, torch.tensor(3.0), 2.0, False):
            model.zero_grad()
            losses.append(assert_step(engine, *BATCH, nn.CrossEntropyLoss()).item())
    assert len(set(losses)) == 6


def test_what_a_hook_wrote_is_gone_with_the_hook(devices):
    """It wrote on every device, and building the replicas anew keeps what lies there."""
    model = mlp()
    with ScatterOnceParallel(model, 1, devices(3)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        handle = model[0].register_forward_pre_hook(lambda module, _: module.weight.data.mul_(2))
        with pytest.raises(ValueError, match=r"parameter '0\.weight'"):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        handle.remove()
        model.zero_grad()
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


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


def test_a_rebound_parameter_is_followed(devices):
    """Its address says nothing: an allocator gives the same one to other weights again."""
    model = mlp()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        for seed in range(3):
            model.zero_grad()
            model[0].weight.data = randn(*model[0].weight.shape, seed=seed)
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_weights_lie_as_cudnn_wants_them(bidirectional, bias):
    """As the master's, that ``flatten_parameters`` has put together from the start of a storage."""
    model = build(
        lambda: nn.ModuleList(
            [
                nn.LSTM(5, 3, 2, bias=bias, bidirectional=bidirectional),
                nn.GRU(3, 2, bias=bias),
                nn.Linear(3, 3),
            ]
        )
    )

    def weights_of(layer):  # matrices first
        return [w for _, w in sorted(layer.named_parameters(), key=lambda item: "bias" in item[0])]

    for layer in model[:2]:
        weights = weights_of(layer)
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.data = part.view_as(weight)
    with ScatterOnceParallel(model, 1, ["cpu:0", "cpu:1"]) as engine:
        for layer in engine.replicas[1][:2]:
            weights = weights_of(layer)
            start = weights[0].untyped_storage().data_ptr()
            for weight in weights:
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


class Scaled(nn.Module):
    """Multiplies by what it finds on its tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.factor = nn.Buffer(torch.ones(CLASSES))
        self.table = nn.Buffer(torch.eye(CLASSES).to_sparse())

    def forward(self, inputs):
        outputs = self.linear(inputs)
        for tensor in (self.linear.bias, self.factor, self.table):
            outputs = outputs * getattr(tensor, "scale", 1.0)
        return outputs


def assert_scaled_step(engine, factor):
    """``copy.deepcopy`` of a parameter leaves its attributes behind, so the twin is told."""
    engine.module.zero_grad()
    loss = engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    twin = build(lambda: nn.Linear(FEATURES, CLASSES))
    twin.load_state_dict(engine.module.linear.state_dict())
    expected = nn.functional.cross_entropy(twin(BATCH[0]) * factor, BATCH[1])
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    assert_close(engine.module.linear.weight.grad, twin.weight.grad, "weight")


@pytest.mark.parametrize("name", ["linear.bias", "factor", "table"])
def test_attributes_of_tensors_are_obeyed(devices, name):
    """Replicas once kept those of the first step, and had none of a buffer's."""
    model = build(Scaled)
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    tensor.scale = 2.0
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        assert_scaled_step(engine, 2.0)
        tensor.scale = 5.0
        assert_scaled_step(engine, 5.0)
        del tensor.scale
        assert_scaled_step(engine, 1.0)
        tensor.scale = torch.tensor(3.0, dtype=torch.float64)
        assert_scaled_step(engine, 3.0)


def test_an_attribute_of_a_tensor_that_turns_writing_on(devices):
    """It is more than a number: forward passes may write parameters from now on."""

    class Clips(nn.Linear):
        def forward(self, inputs):
            if hasattr(self.weight, "limit"):
                with torch.no_grad():
                    self.weight.clamp_(-self.weight.limit, self.weight.limit)
            return super().forward(inputs)

    model = build(lambda: Clips(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        model.weight.limit = 0.1
        before = model.weight.detach().clone()
        with pytest.raises(ValueError, match="writes the parameter 'weight'"):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert torch.equal(model.weight, before)


def test_what_a_forward_pass_sets_on_a_tensor_ends_with_the_step(devices):
    """A cache that it left there once outlived the values that it was made of."""

    class Caches(nn.Linear):
        def forward(self, inputs):
            if not hasattr(self.bias, "shift"):
                self.bias.shift = self.bias.detach().sum()
            return super().forward(inputs) * self.bias.shift

    model = build(lambda: Caches(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for _ in range(2):
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())
            with torch.no_grad():
                model.bias.add_(1.0)
    assert not hasattr(model.bias, "shift")


def test_the_class_of_a_parameter_is_obeyed(devices):
    """The user gives a parameter another class between two steps."""

    class Doubled(nn.Parameter):
        pass

    class Looks(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * (2 if isinstance(self.weight, Doubled) else 1)

    model = build(lambda: Looks(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        model.weight.__class__ = Doubled
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


@pytest.mark.parametrize("name", ["weight", "shift"])
def test_a_tensor_that_becomes_its_own_conjugate(devices, name):
    """It lies where it did, in the same storage with the same strides, and means something else."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((FEATURES,), 1 + 2j, dtype=torch.complex128))
            self.register_buffer("shift", torch.full((FEATURES,), 2 - 1j, dtype=torch.complex128))

        def forward(self, inputs):
            turned = self.weight * inputs + self.shift * self.weight**2
            return turned.imag + 2 * turned.real

    model = Turns()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(3):
            assert_step(engine, BATCH[0], BATCH[0], nn.MSELoss())
            tensor = getattr(model, name)
            tensor.data = tensor.data.conj()
