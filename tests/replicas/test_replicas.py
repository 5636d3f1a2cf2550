"""Whatever the user does to the module between two steps is obeyed by the next."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.agree import Case, agree
from harness.changes import CHANGES, KEEP_THE_LOSS, Model
from harness.models import CLASSES, FEATURES, Classifier, mlp
from harness.oracle import assert_close, assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
MIXED = ["cpu:0", "cpu:1", "cpu:0"]  # one replica shares the master's memory, one has its own


@pytest.mark.contract
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_obeys(change):
    model = build(Model)
    with ScatterOnceParallel(model, 2, MIXED) as engine:
        before = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        model.zero_grad()
        CHANGES[change](model)
        after = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        again = assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    assert torch.equal(after, again)
    assert (change in KEEP_THE_LOSS) == torch.equal(before, after)


@pytest.mark.parametrize("change", CHANGES)
def test_inference_obeys_too(change):
    model = build(Model).eval()
    with ScatterOnceParallel(model, 2, MIXED) as engine:
        engine(BATCH[0])
        CHANGES[change](model)
        expected = copy.deepcopy(model)(BATCH[0]).detach()
        assert_close(engine(BATCH[0]), expected, "output")


class Written(nn.Linear):
    """A layer whose output depends on everything that ``WRITES`` write."""

    scale = 1.0  # what counts while the instance has no other

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.scale = 2.0
        self.register_buffer("offset", torch.zeros(CLASSES))
        self.frozen = nn.Parameter(torch.zeros(CLASSES), requires_grad=False)

    def forward(self, inputs):
        factor = 1.0 if self.training else 0.5
        return super().forward(inputs) * self.scale * factor + self.offset + self.frozen


def set_it(model, value):
    model.scale = value


def delete_it(model, _):
    if "scale" in vars(model):
        del model.scale
    else:
        model.scale = 3.0


def of_classes(value):
    """Another number for each class: cross entropy does not see a number that all have."""
    return torch.linspace(0.0, value, CLASSES, dtype=torch.float64)


WRITES = {
    "set it": set_it,
    "by name": lambda model, value: setattr(model, "sca" + "le", value),
    "in the dictionary": lambda model, value: vars(model).update(scale=value),
    "past the module": lambda model, value: object.__setattr__(model, "scale", value),
    "delete it": delete_it,
    "take it from the dictionary": lambda model, value: (
        vars(model).pop("scale", None) or vars(model).update(scale=value)
    ),
    "a parameter": lambda model, value: setattr(model, "bias", nn.Parameter(of_classes(value))),
    "a frozen parameter": lambda model, value: model.frozen.detach().copy_(of_classes(value)),
    "a buffer": lambda model, value: setattr(model, "offset", of_classes(value)),
    "a hook": lambda model, value: model.register_forward_hook(lambda m, args, y: y * value),
    "its mode": lambda model, _: model.train(not model.training),
}


@pytest.mark.contract
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_followed_however_often(write):
    """From Python 3.13 on attributes lie beside the dictionary, and its watcher hears of no write.

    What Python does with a write may change once it has run a few times: so there are many.
    """
    model = build(Written)
    with ScatterOnceParallel(model, 1, MIXED) as engine:
        for value in 2.0, 0.5, 3.0, 0.25, 4.0, 0.125:
            for _ in range(2):
                model.zero_grad()
                assert_step(engine, *BATCH, nn.CrossEntropyLoss())
            for other in range(50 if write is set_it else 0):
                write(model, float(other))
            write(model, value)


def test_what_a_hook_wrote_is_gone_with_the_hook(devices):
    """It wrote on every device, and building the replicas anew keeps what lies there."""

    def double(module, _):
        module.weight.data.mul_(2)

    model = mlp()
    with ScatterOnceParallel(model, 1, devices(3)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
        handle = model[0].register_forward_pre_hook(double)
        with pytest.raises(RuntimeError, match=r"parameter '0\.weight'"):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        handle.remove()
        model.zero_grad()
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


def test_hooks_of_a_loss_of_torch_are_followed(devices):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, criterion)
        handle = criterion.register_forward_hook(lambda module, args, loss: loss * 2)
        model.zero_grad()
        assert_step(engine, *BATCH, criterion)
        handle.remove()
        model.zero_grad()
        assert_step(engine, *BATCH, criterion)


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

    class Remembers(Classifier):
        def __init__(self):
            super().__init__()
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


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_weights_lie_as_cudnn_wants_them(bidirectional, bias):
    """As the master's, that ``flatten_parameters`` has put together from the start of a storage."""
    lstm = {"bias": bias, "bidirectional": bidirectional}
    model = build(
        lambda: nn.Sequential(nn.LSTM(5, 3, 2, **lstm), nn.GRU(3, 2, bias=bias), nn.Linear(3, 3))
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
        with pytest.raises(RuntimeError, match="writes the parameter 'weight'"):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())


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


# Changes that plain torch follows too, by every way to train.


class Scales(nn.Linear):
    scale = None

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if self.scale is None else outputs * self.scale


class Flattens(nn.Module):
    """Exchanges storages as ``flatten_parameters`` does: replicas kept the first step's weights."""

    def __init__(self, exchange):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 4, num_layers=2)
        self.head = nn.Linear(4, CLASSES)
        self.exchange = exchange

    def forward(self, inputs):
        for parameter in self.parameters():
            self.exchange(parameter)
        return self.head(self.lstm(inputs[None])[0][0])


def set_storage(parameter):
    with torch.no_grad():
        parameter.set_(parameter.clone())


def rebind_data_of(parameter):
    parameter.data = parameter.data.clone()


class Grows(Classifier):
    """A buffer that a forward pass lets grow could not be refreshed in the next step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(1))

    def forward(self, inputs):
        self.seen.data = torch.cat([self.seen, self.seen.new_ones(1)])
        return self.linear(inputs) * len(self.seen)


class Scaled(Classifier):
    """Multiplies by what it finds on its tensors: replicas once kept that of the first step."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Buffer(torch.ones(CLASSES))

    def forward(self, inputs):
        outputs = self.linear(inputs)
        for tensor in (self.linear.bias, self.factor):
            outputs = outputs * getattr(tensor, "scale", 1.0)
        return outputs


class Doubled(nn.Parameter):
    pass


class Looks(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * (2 if isinstance(self.weight, Doubled) else 1)


class Turns(nn.Module):
    """Its own conjugate lies where it did, in the same storage, and means something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((FEATURES,), 1 + 2j, dtype=torch.complex128))
        self.register_buffer("shift", torch.full((FEATURES,), 2 - 1j, dtype=torch.complex128))

    def forward(self, inputs):
        turned = self.weight * inputs + self.shift * self.weight**2
        return turned.imag + 2 * turned.real


def turn(name):
    def change(module):
        tensor = getattr(module, name)
        tensor.data = tensor.data.conj()

    return change


def hook(module):
    module.handle = module[0].register_forward_hook(lambda module, args, output: output * 2)


def hooks(module):
    for factor, shift in ((2, 1), (3, 5)):
        module[0].register_forward_hook(lambda m, args, output, f=factor, s=shift: output * f + s)


def turn_hooks(module):
    order = module[0]._forward_hooks
    order.move_to_end(next(iter(order)))


def rename(module):
    """The same values in the same order, and the last name stays."""
    module[0]._last = None
    names = vars(module[0])
    again = {"_first" if name == "_new" else name: value for name, value in names.items()}
    names.clear()
    names.update(again)


class Named(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * (2 if "_first" in vars(self) else 1)


def attribute(name, value):
    return lambda module: setattr(module, name, value)


SCALES = (1, 0.5, True, None, 0.25, torch.tensor(3.0), 2.0, False)
FOLLOWED = {
    "numbers and flags": Case(
        lambda: Scales(FEATURES, CLASSES), changes=[attribute("scale", s) for s in SCALES]
    ),
    "a hook, taken off": Case(mlp, changes=[hook, lambda module: module.handle.remove()]),
    "hooks in another order": Case(mlp, changes=[hooks, turn_hooks, turn_hooks]),
    "an attribute by another name": Case(
        lambda: nn.Sequential(Named(FEATURES, CLASSES)),
        changes=[lambda m: setattr(m[0], "_new", None), rename],
    ),
    "storage set": Case(lambda: Flattens(set_storage)),
    "storage rebound": Case(lambda: Flattens(rebind_data_of)),
    "a buffer that grows": Case(Grows, accum=1),
    **{
        f"an attribute of {name}": Case(
            Scaled,
            changes=[
                lambda model, find=find, value=value: setattr(find(model), "scale", value)
                for value in (2.0, 5.0, torch.tensor(3.0), 1.0)
            ],
        )
        for name, find in {
            "linear.bias": lambda model: model.linear.bias,
            "factor": lambda model: model.factor,
        }.items()
    },
    "the class of a parameter": Case(
        lambda: Looks(FEATURES, CLASSES),
        changes=[lambda module: setattr(module.weight, "__class__", Doubled)],
    ),
    **{
        f"a conjugate {name}": Case(
            Turns,
            batch=(BATCH[0], BATCH[0]),
            criterion=lambda _: nn.MSELoss(),
            changes=[turn(name)] * 2,
            keep_dtypes=True,
        )
        for name in ("weight", "shift")
    },
}


@pytest.mark.parametrize("runner", ["engine", "pair"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_plain_torch_follows(name, runner):
    agree(FOLLOWED[name], runner, MIXED)
