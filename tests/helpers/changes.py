"""What a user may do to a module between two steps."""

from __future__ import annotations

import torch
from torch import nn

from helpers.models import CLASSES, FEATURES
from helpers.oracle import build, randn


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
        return self.head(hidden) * getattr(self, "bonus", 1.0)


def optimizer_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def load_other_weights(model):
    model.load_state_dict(build(Model, seed=5).state_dict())


def load_by_assignment(model):
    model.load_state_dict(build(Model, seed=6).state_dict(), assign=True)


def edit_data(model):
    model.first.weight.data.mul_(2)
    model.norm.running_var.data.fill_(3)


def rebind_data(model):
    model.first.weight.data = randn(6, FEATURES, seed=7)


def rebind_data_as_a_view(model):
    flat = randn(200, seed=8)
    model.first.weight.data = flat[: 6 * FEATURES].view(6, FEATURES)
    model.head.weight.data = flat[-6 * CLASSES :].view(CLASSES, 6)


def rebind_buffer(model):
    model.offset = randn(6, seed=9)


def replace_parameter(model):
    model.head.bias = nn.Parameter(randn(CLASSES, seed=10))


def remove_parameter(model):
    model.head.bias = None


def transpose_strides(model):
    model.first.weight.data = model.first.weight.data.T.contiguous().T


def freeze(model):
    model.blocks.requires_grad_(False)


def freeze_and_thaw(model):
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)


def rebind_attribute(model):
    model.p = 0.2


def rebind_to_a_tensor(model):
    model.p = randn(6, seed=11)


def rebind_function(model):
    model.act = torch.sin


def add_attribute(model):
    model.bonus = 7.0


def edit_dict(model):
    model.options["scale"] = 3.0


def edit_nested_list(model):
    model.options["nested"][1] = 5.0


def edit_list(model):
    model.shifts.append(0.7)


def edit_set(model):
    model.names.add("second")


def append_layer(model):
    model.blocks.append(build(lambda: nn.Linear(6, 6), seed=12))


def replace_layer(model):
    model.blocks[0] = build(lambda: nn.Linear(6, 6, bias=False), seed=13)


def replace_by_a_layer_of_the_same_shape(model):
    model.first = build(lambda: nn.Linear(FEATURES, 6), seed=14)


def remove_layer(model):
    del model.blocks[1]


def swap_layers(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def tie_weights(model):
    model.blocks[0].weight = model.blocks[1].weight


def register_buffer(model):
    model.register_buffer("extra", randn(6, seed=15))


def delete_buffer(model):
    del model.offset
    model.offset = 0.25


def add_forward_hook(model):
    model.first.register_forward_hook(lambda module, args, output: output * 2)


def add_pre_hook(model):
    model.head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def swap_class(model):
    class Doubled(Model):
        def forward(self, inputs):
            return super().forward(inputs) * 2

    model.__class__ = Doubled


def replace_forward(model):
    model.head.forward = lambda hidden: hidden[:, :CLASSES] * 2


CHANGES = [
    optimizer_step,
    load_other_weights,
    load_by_assignment,
    edit_data,
    rebind_data,
    rebind_data_as_a_view,
    rebind_buffer,
    replace_parameter,
    remove_parameter,
    transpose_strides,
    freeze,
    freeze_and_thaw,
    rebind_attribute,
    rebind_to_a_tensor,
    rebind_function,
    add_attribute,
    edit_dict,
    edit_nested_list,
    edit_list,
    edit_set,
    append_layer,
    replace_layer,
    replace_by_a_layer_of_the_same_shape,
    remove_layer,
    swap_layers,
    tie_weights,
    register_buffer,
    delete_buffer,
    add_forward_hook,
    add_pre_hook,
    swap_class,
    replace_forward,
]
