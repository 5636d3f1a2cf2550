"""Buffers: replica 0's or the mean, bit for bit, and whatever else a buffer may be."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES, Classifier
from harness.module_cases import CASES, Constants
from harness.oracle import assert_close, assert_step, build, gradients, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS = 11  # on three replicas: 4 + 4 + 3
BATCH = randn(ROWS, FEATURES), randint(CLASSES, ROWS)
SHARES = [slice(0, 4), slice(4, 8), slice(8, 11)]


def normalised():
    return build(
        lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    )


def after_share(model, rows, accum):
    """The buffers of a copy of the model that saw these rows in ``accum`` micro-batches."""
    twin = copy.deepcopy(model)
    for piece in BATCH[0][rows].tensor_split(accum):
        twin(piece)
    return dict(twin.named_buffers())


def assert_buffers(model, expected):
    """Bit for bit."""
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.contract
@pytest.mark.parametrize("accum", [1, 2])
def test_master_keeps_those_of_replica_0_bit_for_bit(devices, accum):
    """On a real GPU or a virtual one: the same kernels on the same rows, so the same bits."""
    model = normalised()
    expected = after_share(model, SHARES[0], accum)
    held = dict(model.named_buffers())
    if accum == 2:  # 4 rows as 2 + 2, but 3 as 2 + 1, which batch normalisation refuses
        batch = tuple(part[:8] for part in BATCH)
        device_ids = devices(2)
    else:
        batch, device_ids = BATCH, devices(3)
    with ScatterOnceParallel(model, accum, device_ids) as engine:
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
    assert_buffers(model, expected)
    assert all(buffer is held[name] for name, buffer in model.named_buffers()), "rebound"


@pytest.mark.parametrize("buffers", ["master", "batch"])
def test_constant_buffers_do_not_drift(devices, buffers):
    """A weighted mean of equal numbers is not that number in floating point; inf - inf is NaN."""
    model = build(Constants)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ScatterOnceParallel(model, 1, devices(3), buffers=buffers) as engine:
        for _ in range(7):
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer.nan_to_num(1234), before[name].nan_to_num(1234)), name


@pytest.mark.contract
def test_buffers_that_require_grad_get_gradients(devices):
    model, twin = (CASES["a trained buffer"].build() for _ in range(2))
    nn.CrossEntropyLoss()(twin(BATCH[0]), BATCH[1]).backward()
    with ScatterOnceParallel(model, 2, devices(3), buffers="master") as engine:
        for times in (1, 2):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
            assert_close(model.scale.grad, times * twin.scale.grad, "scale")
    assert model.scale.requires_grad
    assert (model.scale == 1.5).all()


def test_the_master_s_buffers_are_not_the_caller_s_tensors(devices):
    """A buffer taken from the batch must not alias it: the next batch may overwrite it in place."""
    model, inputs = build(Classifier), BATCH[0].clone()
    model.register_buffer("last", torch.zeros(0, FEATURES))
    model.register_forward_pre_hook(lambda module, args: setattr(module, "last", args[0]))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(inputs, BATCH[1], nn.CrossEntropyLoss())
        kept = model.last.clone()
        inputs.zero_()
        assert torch.equal(model.last, kept)


@pytest.mark.parametrize("training", ["nothing", "one layer", "everything"])
def test_inference_moves_statistics_as_a_module_does(devices, training):
    """Under no_grad a training-mode forward is allowed (to re-estimate statistics): it counts."""
    model = normalised().train(training == "everything")
    model[1].train(training != "nothing")
    expected = after_share(model, SHARES[0], 1)
    with (
        ScatterOnceParallel(model, 1, devices(3)) as engine,
        torch.set_grad_enabled(training != "everything"),
    ):
        engine(BATCH[0])
    assert_buffers(model, expected)


def test_a_buffer_written_after_another_was_used_in_the_graph(devices):
    """Buffers of a replica once shared one version counter, so that autograd refused this."""

    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES)
            self.register_buffer("queue", torch.zeros(2, FEATURES))

        def forward(self, inputs):
            outputs = self.norm(inputs)
            self.queue.copy_(outputs.detach()[:2])
            return outputs

    with ScatterOnceParallel(build(Queue), 1, devices(2)) as engine:
        engine.forward_backward(randn(8, FEATURES), criterion=lambda out, _: out.square().mean())
        assert engine.module.queue.any()


class Expanded(Classifier):
    """A buffer whose elements share their place, which torch refuses to write."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)
        self.register_buffer("table", torch.zeros(1))
        self.grows = False

    def forward(self, inputs):
        if self.grows:
            self.table = self.table + 1
        return self.norm(self.linear(inputs)) + self.table


def expanded():
    model = build(Expanded)
    model.table = torch.ones(1, dtype=torch.float64).expand(CLASSES)
    return model


def made_in_inference_mode():
    model = build(Expanded)
    with torch.inference_mode():
        model.table = torch.ones(CLASSES, dtype=torch.float64)
    return model


@pytest.mark.parametrize("buffers", ["master", "batch"])
@pytest.mark.parametrize("make", [expanded, made_in_inference_mode])
def test_a_buffer_that_torch_refuses_to_write(devices, make, buffers):
    """A step that does not change it leaves it as it is; a forward pass may rebind it."""
    model = make()
    held, strides = model.table, model.table.stride()
    with ScatterOnceParallel(model, 1, devices(2), buffers=buffers) as engine:
        for _ in range(2):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert model.table is held
        assert held.stride() == strides
        model.grows = True
        for _ in range(2):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert torch.equal(model.table, torch.full((CLASSES,), 3.0, dtype=torch.float64))


def test_a_step_that_fails_with_an_expanded_buffer_takes_everything_back(devices):
    model = expanded()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        before, given = copy.deepcopy(model.state_dict()), gradients(model)

        def refuse(_):
            raise KeyError("mine")

        handle = model.linear.weight.register_hook(refuse)
        with pytest.raises(KeyError, match="mine"):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        handle.remove()
    for found, expected in ((model.state_dict(), before), (gradients(model), given)):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def registered(model):
    return dict(model._buffers), list(model.state_dict()), set(model._non_persistent_buffers_set)


class Late(Classifier):
    def __init__(self, act):
        super().__init__()
        self.register_buffer("shown", torch.ones(()))
        self.calls, self.act = 0, act

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 3:
            self.act(self)
        return self.linear(inputs)


REGISTRATIONS = {
    "new": lambda module: module.register_buffer("new", torch.ones(())),
    "deleted": lambda module: delattr(module, "shown"),
    "left out": lambda module: module.register_buffer("shown", module.shown, persistent=False),
    "None": lambda module: module.register_buffer("none", None),
}


@pytest.mark.parametrize("act", REGISTRATIONS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_buffer_that_a_forward_pass_registers_is_refused(devices, act, whole):
    """Each replica would register one of its own; a failed step once left one behind as None."""
    model = build(lambda: Late(REGISTRATIONS[act]))
    before = registered(model)
    with ScatterOnceParallel(model, 3, devices(2), verify=False) as engine:
        with pytest.raises(ValueError, match=r"registers or deletes buffers \((new|shown|none)\)"):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss(), whole_batch=whole)
        assert str(registered(model)) == str(before)
        assert all(parameter.grad is None for parameter in model.parameters())
        model.calls = 9
        assert_step(engine, *BATCH, nn.CrossEntropyLoss(), whole_batch=whole)


class Twins(Classifier):
    """Two averages that begin as one tensor."""

    def __init__(self, how):
        super().__init__()
        start = torch.zeros(())
        self.register_buffer("fast", start)
        self.register_buffer("slow", start)
        self.how = how

    def forward(self, inputs):
        if self.how != "in place":
            self.fast = self.fast * 0.5 + 1
        if self.how == "both":
            self.slow = self.slow * 0.9 + 1
        else:
            self.slow.add_(3)
        return self.linear(inputs)


@pytest.mark.parametrize("buffers", ["master", "batch"])
@pytest.mark.parametrize("how", ["both", "one", "in place"])
def test_buffers_that_begin_as_one_tensor(devices, how, buffers):
    """The last of both once won, since they were written into the one tensor."""
    model = build(lambda: Twins(how))
    model.slow = model.fast  # ``double`` made two of them
    twin = copy.deepcopy(model)
    assert twin.slow is twin.fast
    with ScatterOnceParallel(model, 1, devices(2), buffers=buffers) as engine:
        for _ in range(3):
            assert_step(engine, *BATCH, nn.CrossEntropyLoss())
            twin(BATCH[0])
            assert (model.fast is model.slow) == (twin.fast is twin.slow)
            assert_close(model.fast, twin.fast, "fast")
            assert_close(model.slow, twin.slow, "slow")
