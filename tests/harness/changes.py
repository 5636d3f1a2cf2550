"""What a user may do to a module between two steps."""

from __future__ import annotations

import torch
from torch import nn

from harness.models import CLASSES, FEATURES
from harness.oracle import build, randn


class Model(nn.Module):
    """Something of everything that a user may turn, exchange, add or take away."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("offset", torch.zeros(6))
        self.p = 0.5
        self.options = {"scale": 1.0, "nested": [1.0, 2.0]}
        self.shifts = [0.0]
        self.act = torch.tanh
        self.names = {"first"}
        self.norm.eval()

    def forward(self, inputs):
        hidden = self.act(self.first(inputs)) * self.p * self.options["scale"]
        hidden = hidden * self.options["nested"][1] + sum(self.shifts)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        hidden = self.norm(hidden) + self.offset
        if "second" in self.names:
            hidden = hidden * 3
        for name, buffer in self.named_buffers(recurse=False):
            if name.startswith("extra"):
                hidden = hidden + buffer
        hidden = hidden if self.head.training else hidden * 2
        return self.head(hidden) * getattr(self, "bonus", 1.0)


def optimizer_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def edit_data(model):
    model.first.weight.data.mul_(2)
    model.norm.running_var.data.fill_(3)


def rebind_data_as_a_view(model):
    flat = randn(200, seed=8)
    model.first.weight.data = flat[: 6 * FEATURES].view(6, FEATURES)
    model.head.weight.data = flat[-6 * CLASSES :].view(CLASSES, 6)


def freeze_and_thaw(model):
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)


def swap_layers(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def delete_buffer(model):
    del model.offset
    model.offset = 0.25


def swap_class(model):
    class Doubled(Model):
        def forward(self, inputs):
            return super().forward(inputs) * 2

    model.__class__ = Doubled


def sets(path, make):
    """Rebinds what is there to what ``make`` makes, of the model."""
    *parents, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(parents)), name, make(model))


def layer(*sizes, seed, **options):
    return lambda _: build(lambda: nn.Linear(*sizes, **options), seed)


CHANGES = {
    "optimizer step": optimizer_step,
    "other weights": lambda model: model.load_state_dict(build(Model, seed=5).state_dict()),
    "other weights, assigned": lambda model: model.load_state_dict(
        build(Model, seed=6).state_dict(), assign=True
    ),
    "edit data": edit_data,
    "rebind data": lambda model: setattr(model.first.weight, "data", randn(6, FEATURES, seed=7)),
    "rebind data as a view": rebind_data_as_a_view,
    "rebind a buffer": sets("offset", lambda _: randn(6, seed=9)),
    "replace a parameter": sets("head.bias", lambda _: nn.Parameter(randn(CLASSES, seed=10))),
    "remove a parameter": sets("head.bias", lambda _: None),
    "transpose strides": lambda model: setattr(
        model.first.weight, "data", model.first.weight.data.T.contiguous().T
    ),
    "freeze": lambda model: model.blocks.requires_grad_(False),
    "freeze and thaw": freeze_and_thaw,
    "evaluate a layer": lambda model: model.head.eval(),
    "rebind an attribute": sets("p", lambda _: 0.2),
    "rebind it to a tensor": sets("p", lambda _: randn(6, seed=11)),
    "rebind a function": sets("act", lambda _: torch.sin),
    "add an attribute": sets("bonus", lambda _: 7.0),
    "edit a dict": lambda model: model.options.update(scale=3.0),
    "edit a nested list": lambda model: model.options["nested"].__setitem__(1, 5.0),
    "edit a list": lambda model: model.shifts.append(0.7),
    "edit a set": lambda model: model.names.add("second"),
    "append a layer": lambda model: model.blocks.append(layer(6, 6, seed=12)(model)),
    "replace a layer": sets("blocks.0", layer(6, 6, seed=13, bias=False)),
    "replace it by one of the same shape": sets("first", layer(FEATURES, 6, seed=14)),
    "remove a layer": lambda model: model.blocks.__delitem__(1),
    "swap layers": swap_layers,
    "tie weights": sets("blocks.0.weight", lambda model: model.blocks[1].weight),
    "register a buffer": lambda model: model.register_buffer("extra", randn(6, seed=15)),
    "delete a buffer": delete_buffer,
    "add a forward hook": lambda model: model.first.register_forward_hook(
        lambda module, args, output: output * 2
    ),
    "add a pre-hook": lambda model: model.head.register_forward_pre_hook(
        lambda module, args: (args[0] + 1,)
    ),
    "swap the class": swap_class,
    "replace a forward": sets("head.forward", lambda _: lambda hidden: hidden[:, :CLASSES] * 2),
}
KEEP_THE_LOSS = {"freeze", "freeze and thaw", "transpose strides"}
