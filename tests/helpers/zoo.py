"""Modules of every kind, small, that turn (rows, FEATURES) into (rows, CLASSES)."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.models import CLASSES, FEATURES


def linear():
    return nn.Linear(FEATURES, CLASSES)


class ParameterContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(FEATURES, 3)) for _ in range(2)])
        self.named = nn.ParameterDict({"head": nn.Parameter(torch.randn(3, CLASSES))})
        self.branches = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def forward(self, inputs):
        hidden = sum((inputs @ row).tanh() for row in self.rows)
        return sum(branch(hidden) for branch in self.branches.values()) @ self.named["head"]


class Tied(nn.Module):
    """A parameter under two names, and a module under two names."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(FEATURES, FEATURES)
        self.two = nn.Linear(FEATURES, FEATURES)
        self.two.weight = self.one.weight
        self.again = self.one
        self.head = linear()

    def forward(self, inputs):
        return self.head(self.again(self.two(self.one(inputs).tanh()).tanh()))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        return self.head(self.lstm(inputs[:, None].repeat(1, 3, 1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, inputs):
        hidden = self.embed(inputs[:, :, None])
        return self.encoder(self.attention(hidden, hidden, hidden)[0]).mean(1)


class UnregisteredList(nn.Module):
    """Submodules in plain lists, tuples and dicts: registered elsewhere, or not at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])
        self.order = [self.layers[1], (self.layers[0],)]
        self.hidden = {"stranger": [nn.Linear(FEATURES, FEATURES).double()]}
        self.head = linear()

    def forward(self, inputs):
        inputs = self.order[1][0](self.order[0](inputs).tanh())
        return self.head(self.hidden["stranger"][0](inputs))


class KnowsItsParent(nn.Module):
    """A child that reaches its parent through a list, as some libraries do."""

    def __init__(self):
        super().__init__()
        self.child = linear()
        self.child.parent = [self]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.child(inputs) * self.child.parent[0].scale


def bound_forward():
    model = linear()
    model.forward = functools.partial(type(model).forward, model)
    return nn.Sequential(model, nn.Tanh())


class Wrapped(nn.Module):
    """Its forward is a bound method of itself, as ``accelerate`` puts it there."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.forward = self.compute

    def compute(self, inputs):
        return self.linear(inputs)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs**3

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        return 3 * inputs**2 * gradient


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, inputs):
        return Cube.apply(self.linear(inputs))


class InPlaceFirst(nn.Module):
    """The first thing it does is to write to its input."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, inputs):
        return self.linear(inputs.mul_(2).add_(1))


OVERLAPPING = {
    "row": lambda table: table[2],
    "rows": lambda table: table[1:3],
    "the same": lambda table: table.detach(),
    "column": lambda table: table[:, 1],
    "transposed": lambda table: table.t(),
    "bytes": lambda table: table[1].view(torch.int8),
}


class Overlapping(nn.Module):
    """Writes one tensor in its forward pass, and reads what overlaps it in memory."""

    def __init__(self, other, as_buffer):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("table", torch.rand(4, CLASSES, dtype=torch.float64))
        self.register_buffer("apart", torch.rand(CLASSES))
        if as_buffer:
            self.register_buffer("other", OVERLAPPING[other](self.table))
        else:
            self.other = OVERLAPPING[other](self.table)

    def forward(self, inputs):
        self.table += torch.arange(1, 1 + CLASSES)
        other = self.other.view(torch.float64) if self.other.dtype == torch.int8 else self.other
        return self.linear(inputs) * (1 + other.reshape(-1)[:CLASSES]) + self.apart


class ComplexInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex128))

    def forward(self, inputs):
        return (inputs.to(torch.complex128) @ self.weight).abs()


class ComputesItsOwnGradient(nn.Module):
    """Forces: the gradient of an energy is part of the output (double backward)."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, inputs):
        inputs = inputs.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(inputs).sum(), inputs, create_graph=True)
        return forces[:, :CLASSES]


def weight_norm_old():
    return nn.utils.weight_norm(linear())


def spectral_norm_old():
    return nn.utils.spectral_norm(linear()).eval()


MODELS = {
    "parameter containers": ParameterContainers,
    "tied": Tied,
    "lstm": Recurrent,
    "attention": Attention,
    "unregistered list": UnregisteredList,
    "knows its parent": KnowsItsParent,
    "forward is a partial": bound_forward,
    "forward is a bound method": Wrapped,
    "custom function": CustomFunction,
    "in-place first layer": InPlaceFirst,
    "in-place activation": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "double backward": ComputesItsOwnGradient,
    "shared activation module": lambda: nn.Sequential(*[linear(), act := nn.Tanh(), act]),
    "weight norm, old": weight_norm_old,
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm, old": spectral_norm_old,
    "spectral norm": lambda: parametrizations.spectral_norm(linear()).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
}
