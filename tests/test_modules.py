"""Modules of every kind: containers, ties, recurrences, dtypes, layouts, odd forwards."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randint,
    randn,
)
from helpers.zoo import MODELS, ComplexInside, UnregisteredList, linear
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)


@pytest.mark.parametrize("model", MODELS)
def test_exact_step_after_step(devices, model):
    module, plain = build(MODELS[model]), build(MODELS[model])
    criterion = nn.CrossEntropyLoss()
    inputs = BATCH[0].clone()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, plain)]
    with ScatterOnceParallel(module, 2, devices(3)) as engine:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = criterion(plain(inputs.clone()), BATCH[1])
            expected.backward()
            loss = engine.forward_backward(inputs, BATCH[1], criterion)
            assert_close(loss, expected.detach(), "loss")
            assert_gradients(module, gradients(plain))
            for optimizer in optimizers:
                optimizer.step()
    assert torch.equal(inputs, BATCH[0]), "the caller's tensors were written"


def test_the_module_s_own_modules_are_left_alone(devices):
    """Replication must not exchange children, hooks or attributes of the user's module."""
    module = build(UnregisteredList)
    before = {name: id(child) for name, child in module.named_modules()}
    attributes = {name: id(value) for name, value in vars(module).items()}
    with ScatterOnceParallel(module, 2, devices(3)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert {name: id(child) for name, child in module.named_modules()} == before
    assert {name: id(value) for name, value in vars(module).items()} == attributes


def test_complex_parameters(devices):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ComplexInside()
    with ScatterOnceParallel(module, 2, devices(3)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    assert module.weight.grad.dtype == torch.complex128


class Lazy(nn.Module):
    """A parameter whose memory holds the conjugates, or the negatives, of its elements."""

    def __init__(self, values):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.factor = nn.Parameter(values)

    def forward(self, inputs):
        factor = self.factor
        return self.linear(inputs) * (factor.real + factor.imag if factor.is_complex() else factor)


@pytest.mark.parametrize(
    "lazy", [torch.conj, lambda values: values.conj().imag], ids=["conjugates", "negatives"]
)
def test_parameters_that_hold_conjugates_or_negatives(devices, lazy):
    """The look at what a forward pass wrote once failed with words of torch's about these."""
    values = randn(CLASSES, dtype=torch.complex128)
    module, plain = (build(lambda: Lazy(lazy(values.clone()))) for _ in range(2))
    with ScatterOnceParallel(module, 2, devices(3)) as engine:
        for _ in range(2):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
            nn.CrossEntropyLoss()(plain(BATCH[0]), BATCH[1]).backward()
            assert_gradients(module, gradients(plain))
            with torch.no_grad():
                module.factor.mul_(1.5), plain.factor.mul_(1.5)


@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 3e-3)]
)
def test_low_precision_parameters_keep_their_dtype(devices, dtype, relative):
    module = build(linear).to(dtype)
    module.bias.data = module.bias.data.double().to(dtype)
    with ScatterOnceParallel(module, 2, devices(3)) as engine:
        loss = assert_step(
            engine, BATCH[0].to(dtype), BATCH[1], nn.CrossEntropyLoss(), relative=relative
        )
    assert loss.dtype == dtype
    assert {parameter.grad.dtype for parameter in module.parameters()} == {dtype}


def test_parameters_of_several_dtypes_in_one_module(devices):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(FEATURES, 4).double()
            self.odd = nn.Parameter(torch.randn(3))
            self.narrow = nn.Linear(4, CLASSES).float()

        def forward(self, inputs):
            return self.narrow(self.wide(inputs).float()) * self.odd.sum()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Mixed()
    with ScatterOnceParallel(module, 2, devices(3)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss(), relative=1e-5)
    assert [p.grad.dtype for p in module.parameters()] == [p.dtype for p in module.parameters()]


def test_memory_format_is_kept(devices):
    module = build(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, CLASSES, 2)))
    module.to(memory_format=torch.channels_last)
    images = randn(6, 3, 5, 5).to(memory_format=torch.channels_last)
    seen = []
    module.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        engine.forward_backward(images, None, lambda output, _: output.pow(2).mean())
        replica_weight = engine.replicas[1][0].weight
    assert all(seen)
    for weight in (replica_weight, module[0].weight, module[0].weight.grad):
        assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(devices, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(FEATURES, 6)
            self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            self.head = nn.Linear(6, CLASSES)

        def forward(self, inputs):
            hidden = self.stem(inputs)
            return self.head(checkpoint(self.block, hidden, use_reentrant=use_reentrant))

    with ScatterOnceParallel(build(Checkpointed), 2, devices(3)) as engine:
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


def test_lazy_modules_say_what_to_do_and_work_once_initialised(devices):
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        with pytest.raises(
            RuntimeError, match=r"uninitialised lazy parameter, '0.weight': call the module once"
        ):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        with torch.random.fork_rng(devices=[]):
            module(BATCH[0][:2])
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


class Doubled(nn.Parameter):
    """A parameter with a constructor and a method of its own."""

    def __new__(cls, values, factor=None):
        return super().__new__(cls, values)

    def __init__(self, values, factor):
        self.factor = factor

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), Doubled(self.detach().clone(), self.factor))

    def scaled(self):
        return self * self.factor


class Slotted(nn.Parameter):
    """A parameter of another layout than a tensor."""

    __slots__ = ("note",)


class Counted(nn.Parameter):
    """A parameter that takes part in what torch does with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return result * 3 if function is nn.functional.linear else result


class OwnParameters(nn.Module):
    """Asks what its parameters and buffers are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.doubled = Doubled(torch.randn(CLASSES), 2.0)
        self.linear.weight = Counted(self.linear.weight.detach())
        self.slotted = Slotted(torch.randn(CLASSES))
        self.buffer = nn.Buffer(torch.ones(()))

    def forward(self, inputs):
        outputs = self.linear(inputs)
        if isinstance(self.doubled, Doubled):
            outputs = outputs + self.doubled.scaled()
        if isinstance(self.slotted, Slotted):
            outputs = outputs * self.slotted
        return outputs * (5 if isinstance(self.buffer, nn.Buffer) else 1)


@pytest.mark.parametrize("accum", [1, 2])
def test_parameters_of_the_user_s_own_class(devices, accum):
    """Replicas once had plain ones, so that branches on their class went another way."""
    for device_ids in (["cpu"], devices(3)):
        model, twin = build(OwnParameters), build(OwnParameters)
        loss = nn.functional.cross_entropy(twin(BATCH[0]), BATCH[1])
        loss.backward()
        with ScatterOnceParallel(model, accum, device_ids) as engine:
            ours = engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert_close(ours, loss.detach(), "loss")
        assert_gradients(model, gradients(twin))


def test_the_pair_keeps_the_classes_of_parameters(devices):
    """As far as they have the layout of tensors; replicas of the pair are no leaves."""
    model, twin = build(OwnParameters), build(OwnParameters)
    for module in (model, twin):
        module.slotted = Doubled(module.slotted.detach(), 1.0)
    loss = nn.functional.cross_entropy(twin(BATCH[0]), BATCH[1])
    loss.backward()
    pair = DataParallelModel(model, devices(3))
    ours = DataParallelCriterion(nn.CrossEntropyLoss())(pair(BATCH[0]), BATCH[1])
    ours.backward()
    assert_close(ours.detach(), loss.detach(), "loss")
    assert_gradients(model, gradients(twin))


class Masked(nn.Linear):
    """Reaches a buffer, and itself, through attributes of its weight."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.double()
        self.register_buffer("mask", torch.ones(CLASSES, FEATURES, dtype=torch.float64))
        self.weight.mask = self.mask
        self.weight.owner = self

    def forward(self, inputs):
        self.mask.mul_(0.5)
        return super().forward(inputs) @ self.weight.mask + self.weight.owner.mask.sum()


def test_attributes_of_tensors_that_are_the_module_s_own(devices):
    """A replica's parameter once led to the user's buffer, and to the user's module."""
    for run in ("engine", "pair"):
        model, twin = build(Masked), build(Masked)
        inputs, targets = BATCH[0], randint(FEATURES, len(BATCH[0]))
        nn.functional.cross_entropy(twin(inputs), targets).backward()
        if run == "engine":
            with ScatterOnceParallel(model, 1, devices(3)) as engine:
                engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        else:
            outputs = DataParallelModel(model, devices(3))(inputs)
            DataParallelCriterion(nn.CrossEntropyLoss())(outputs, targets).backward()
        assert_gradients(model, gradients(twin))
