"""Between steps the user exchanges a storage for one of another layout, dtype or memory,
or puts a former one back. Copies on other devices have the values of now.

Parameters go in messages that are unpacked into views that are kept, or, if they are
large, along a chain of devices. The views were those of earlier storages.
"""

from __future__ import annotations

import pytest
import torch
from harness.oracle import assert_close, build, randn
from torch import nn
from torch.nn.utils import prune

from scatterpar import ScatterOnceParallel, ShardedOptimizer
from scatterpar.devices import pieces

pytestmark = pytest.mark.core
BATCHES = randn(4, 6, 3, 4, 4)
TARGETS = randn(4, 6, 3)


class Convolutions(nn.Module):
    """Reads the weights before their layers run, when no hook has computed them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 2, padding=1) for _ in range(3))

    def forward(self, inputs):
        first, second, _ = [layer.weight.detach() for layer in self.layers]
        scale = 1 + (first[0, 0, 0, 1] - 2 * second[0, 1, 1, 0] + first[0, 2, 1, 0])
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs[..., 0, 0] * scale.to(inputs.dtype)


class Shifted(nn.Module):
    """Adds a buffer in the memory of a weight, and two more of one dtype."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.linear = nn.Linear(48, 3)
        self.first = nn.Buffer(self.linear.weight.data[0])
        self.scale = nn.Buffer(torch.ones(3))
        self.shift = nn.Buffer(torch.ones(3))

    def double(self):
        self.linear.double()
        self.first = self.linear.weight.data[0]
        self.scale = self.scale.to(torch.float16)
        self.shift = self.shift.to(torch.float16)
        return self

    def forward(self, inputs):
        flat = inputs.flatten(1)
        hidden = self.linear(flat) + self.first[:3] + self.scale + self.shift
        product = hidden.to(self.weight.dtype) @ self.weight + self.bias
        return product.real - product.imag


def pruned(net):
    for layer in net.layers:
        prune.l1_unstructured(layer, "weight", amount=0.3)


def pruned_in_float(net):
    net.float()
    pruned(net)


def normed(net):
    for layer in net.layers:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(layer)


def to_channels_last(net):
    net.to(memory_format=torch.channels_last)


def to_float(net):
    net.float()


def to_double(net):
    net.double()


def load_channels_last(net):
    state = {
        name: value.contiguous(memory_format=torch.channels_last)
        if value.dim() == 4
        else value
        for name, value in net.state_dict().items()
    }
    net.load_state_dict(state, assign=True)


def transpose_memory(net):
    for layer in net.layers:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.dim() == 4:
                transposed = tensor.data.transpose(2, 3).contiguous()
                tensor.data = transposed.transpose(2, 3)


def exchange_weight(net):
    net.linear.weight.data = net.linear.weight.data * 2


def conjugate(net):
    net.weight.data = net.weight.data.conj()


def negate(net):
    net.weight.data = torch._neg_view(net.weight.data)


def reinterpret(net):
    net.scale.data = net.scale.data.view(torch.bfloat16)


CONVOLUTIONS = [to_channels_last, to_float, load_channels_last, transpose_memory]
PROGRAMS = [
    *[(Convolutions, pruned, change) for change in CONVOLUTIONS],
    *[(Convolutions, normed, change) for change in CONVOLUTIONS],
    (Convolutions, pruned_in_float, to_double),
    *[(Shifted, None, change) for change in (exchange_weight, conjugate, negate)],
    (Shifted, None, reinterpret),
]


@torch.no_grad()
def update(plain, net):
    """A step of the plain network, whose values both get."""
    for parameter, of_plain in zip(net.parameters(), plain.parameters(), strict=True):
        of_plain.sub_(0.1 * of_plain.grad)
        parameter.copy_(of_plain)


@pytest.fixture(params=["message", "relay"])
def layout(request, monkeypatch):
    """Two devices get messages. Of four, each sends to the next one."""
    if request.param == "message":
        return ["cpu:0", "cpu:1"]
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)
    return [f"cpu:{number}" for number in range(4)]


def made(make, prepare):
    net = build(make)
    if prepare is not None:
        prepare(net)
    return net


@pytest.mark.parametrize(
    ("make", "prepare", "change"),
    PROGRAMS,
    ids=[" ".join(part.__name__ for part in row if part) for row in PROGRAMS],
)
@pytest.mark.parametrize("is_call", [False, True], ids=["step", "call"])
def test_change_between_steps(layout, make, prepare, change, is_call):
    plain, net = made(make, prepare), made(make, prepare)
    with ScatterOnceParallel(net, 1, layout) as engine:
        for number, (inputs, targets) in enumerate(zip(BATCHES, TARGETS, strict=True)):
            dtype = next(net.parameters()).real.dtype
            inputs, targets = inputs.to(dtype), targets.to(dtype)
            for module in (plain, net):
                module.zero_grad()
            with torch.no_grad():
                plain(inputs)  # hooks compute the weights of now
            expected = nn.functional.mse_loss(plain(inputs), targets)
            expected.backward()
            if is_call:
                loss = nn.functional.mse_loss(engine(inputs), targets)
                loss.backward()
            else:
                loss = engine.forward_backward(inputs, targets, nn.MSELoss())
            relative = 1e-10 if dtype == torch.float64 else 1e-5
            assert_close(loss.detach(), expected.detach(), f"loss {number}", relative)
            for (name, parameter), of_plain in zip(
                net.named_parameters(), plain.parameters(), strict=True
            ):
                words = f"{name} in step {number}"
                assert_close(parameter.grad, of_plain.grad, words, relative)
            update(plain, net)
            if number == 1:
                change(plain)
                change(net)


class ExchangesStorages(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


def test_storage_put_back_after_a_sharded_step(layout):
    """A step of the optimizer that the user rejects."""
    net = build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    inputs = randn(8, 3)
    with ScatterOnceParallel(net, 1, layout) as engine:
        optimizer = ShardedOptimizer(
            engine, ExchangesStorages, lr=1.0, elementwise=True
        )
        for number in range(4):
            net.zero_grad()
            engine.forward_backward(inputs, inputs, nn.MSELoss())
            expected = torch.autograd.grad(
                nn.functional.mse_loss(net(inputs), inputs), list(net.parameters())
            )
            for parameter, gradient in zip(net.parameters(), expected, strict=True):
                assert_close(parameter.grad, gradient, f"step {number}")
            saved = [(p, p.data, p.data.clone()) for p in net.parameters()]
            optimizer.step()
            if number:
                for parameter, storage, values in saved:
                    parameter.data = storage
                    parameter.data.copy_(values)


@pytest.mark.parametrize("prepare", [pruned, normed])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_step_after_training_mode_in_inference(layout, prepare, steps_before):
    """The call leaves weights that count no writes, in plain torch, too."""
    net = made(Convolutions, prepare)
    batch = BATCHES[0], TARGETS[0], nn.MSELoss()
    with ScatterOnceParallel(net, 1, layout) as engine:
        for _ in range(steps_before):
            engine.forward_backward(*batch)
        with torch.inference_mode():
            engine(BATCHES[0])
        net.zero_grad()
        engine.forward_backward(*batch)
        actual = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        nn.functional.mse_loss(net(BATCHES[0]), TARGETS[0]).backward()
        for gradient, parameter in zip(actual, net.parameters(), strict=True):
            assert_close(gradient, parameter.grad, "gradient")
