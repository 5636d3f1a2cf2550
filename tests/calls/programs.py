"""Programs that call a module in training: the same with an engine, the pair, or plain.

A program gets ``call``, which stands for the module, and ``net``, the module itself. It
returns the loss of some rows. ``call`` of the pair is followed by ``gather``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from harness.oracle import RELATIVE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BY_ENGINE_ALONE = "reads what the module is left with, or needs one output"


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cross_entropy(call: Any, net: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(call(rows), labels)


@dataclass
class Program:
    """A module, and what a user does with it.

    Attributes:
        make: makes the module.
        loss: the loss of some rows: ``loss(call, net, rows, labels)``.
        engine_alone: why the pair cannot run it.
        relative: the rounding of gradients.
    """

    make: Callable[[], nn.Module] = mlp
    loss: Callable[..., Tensor] = cross_entropy
    engine_alone: str = ""
    relative: float = RELATIVE


class Own(nn.Module):
    """A module with a ``forward`` that is given."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def _makes_mask(self, rows):
    if self.mask is None:
        self.mask = torch.arange(3, dtype=rows.dtype, device=rows.device)[None]
    return self.net(rows) * self.mask


def _makes_tables(self, rows):
    output = self.net(rows)
    size = output.shape[1]
    if size not in self.tables:
        table = torch.ones(1, size, dtype=rows.dtype, device=rows.device)
        self.tables[size] = [table]
    return output + self.tables[size][0]


def _tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def _frozen_first():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def _recurrent():
    def forward(self, rows):
        hidden, _ = self.cell(rows[:, None].expand(-1, 4, -1))
        return self.head(hidden[:, -1])

    return Own(forward, cell=nn.LSTM(6, 5, batch_first=True), head=nn.Linear(5, 3))


def _attention():
    def forward(self, rows):
        tokens = rows[:, :, None] * self.scale
        mixed, _ = self.attention(tokens, tokens, tokens)
        return self.head(mixed.mean(1))

    return Own(
        forward,
        scale=nn.Parameter(torch.linspace(0.1, 1, 4)),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, 3),
    )


def _images():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def _checkpointed(use_reentrant):
    def make():
        def forward(self, rows):
            hidden = self.first(rows)
            hidden = checkpoint(self.second, hidden, use_reentrant=use_reentrant)
            return self.third(hidden)

        return Own(
            forward,
            first=nn.Linear(6, 8),
            second=nn.Sequential(nn.Tanh(), nn.Linear(8, 8)),
            third=nn.Linear(8, 3),
        )

    return make


def _around(use_reentrant):
    def loss(call, net, rows, labels):
        rows = rows.clone().requires_grad_()
        output = checkpoint(call, rows, use_reentrant=use_reentrant)
        return F.cross_entropy(output, labels)

    return loss


def _unused_on_some(self, rows):
    hidden = self.body(rows).tanh()
    if float(rows.detach().sum()) > 0:  # of the rows of a replica
        return self.head(hidden) + 0 * self.other(hidden)
    return self.head(hidden)


def _penalty(call, net, rows, labels):
    penalty = sum(parameter.square().sum() for parameter in net.parameters())
    return F.cross_entropy(call(rows), labels) + 0.01 * penalty


def _gradient_penalty(call, net, rows, labels):
    inputs = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(inputs).sum(), inputs, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def _two_calls(call, net, rows, labels):
    first, second = call(rows), call(rows + 0.1)
    return F.cross_entropy(
        first @ second.T, torch.arange(len(rows), device=rows.device)
    )


def _two_losses(call, net, rows, labels):
    output = call(rows)
    F.cross_entropy(output, labels).backward(retain_graph=True)
    return output.square().mean()


def _chained(call, net, rows, labels):
    hidden = call(rows)
    return F.cross_entropy(call(hidden.repeat(1, 2)), labels)


def _hessian_vector(call, net, rows, labels):
    loss = F.cross_entropy(call(rows), labels)
    parameters = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients) + loss


def _selected(call, net, rows, labels):
    loss = F.cross_entropy(call(rows), labels)
    (of_weight,) = torch.autograd.grad(loss, net[0].weight, retain_graph=True)
    return loss * of_weight.detach().norm()


def _under_autocast(call, net, rows, labels):
    net.float()
    with torch.autocast("cpu", torch.bfloat16):
        output = call(rows.float())
    return F.cross_entropy(output.float(), labels)


def _returning(build):
    def make():
        return Own(lambda self, rows, *more: build(self.net(rows), *more), net=mlp())

    return make


def _by_name(call, net, rows, labels):
    output = call(rows=rows, factors=torch.arange(len(rows)).to(rows))
    return F.cross_entropy(output, labels)


def _named(self, rows, factors):
    return self.net(rows) * factors[:, None]


def _nested_arguments(call, net, rows, labels):
    batch = {"rows": rows, "more": [rows.sin(), (rows.cos(), 3)]}
    return F.cross_entropy(call((batch,)) if call is not net else net(batch), labels)


def _of_nested(self, batch):
    sine, (cosine, factor) = batch["more"]
    return self.net(batch["rows"] + factor * sine * cosine)


def _inside(reduction):
    def forward(self, rows, labels):
        output = self.net(rows)
        loss = F.cross_entropy(output, labels, reduction=reduction)
        return {"loss": loss, "logits": output}

    return lambda: Own(forward, net=mlp())


def _own_loss(call, net, rows, labels):
    return call(rows, labels)["loss"]


def _own_loss_ignoring(call, net, rows, labels):
    labels = labels.clone()
    labels[: len(labels) // 3] = -100
    return call(rows, labels)["loss"]


def _left_in_attribute(self, rows):
    self.hidden = self.net[0](rows)
    return self.net[2](self.hidden.tanh())


def _reads_attribute(call, net, rows, labels):
    loss = F.cross_entropy(call(rows), labels)
    return loss + net.hidden.square().mean()


class FillsList(nn.Module):
    """A hook appends to a list in its closure."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        features = self.__dict__["features"] = []

        def keep(module, args, output):
            features.append(output)

        self.net[1].register_forward_hook(keep)

    def forward(self, rows):
        return self.net(rows)


def _reads_list(call, net, rows, labels):
    net.features.clear()
    loss = F.cross_entropy(call(rows), labels)
    (hidden,) = net.features
    return loss + hidden.square().mean()


def _sparse():
    table = nn.Embedding(9, 5, sparse=True)
    return Own(lambda self, labels: self.head(self.table(labels)), table=table,
               head=nn.Linear(5, 3))  # fmt: skip


def _looks_up(call, net, rows, labels):
    return F.cross_entropy(call(labels * 2), labels)


def _scalar_input(call, net, rows, labels):
    temperature = net.temperature * 2
    return F.cross_entropy(call(rows, temperature), labels)


def _scaled(self, rows, temperature):
    return self.net(rows) * temperature


def _buffers():
    net = mlp()
    net.register_buffer("mean", torch.linspace(0, 1, 6))
    return Own(lambda self, rows: self.net(rows - self.net.mean), net=net)


def _counts(self, rows):
    self.calls += 1
    return self.net(rows)


def _counter():
    return Own(_counts, net=mlp(), calls=0)


def _weight_norm():
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def _pruned():
    net = mlp()
    nn.utils.prune.l1_unstructured(net[0], "weight", 0.3)
    return net


def _modules_in_dict():
    parts = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 3)})
    return Own(lambda self, rows: self.parts["b"](self.parts["a"](rows).tanh()),
               parts=parts)  # fmt: skip


def _complex():
    weight = torch.complex(torch.randn(6, 3).double(), torch.randn(6, 3).double())
    return Own(lambda self, rows: (rows.to(self.weight.dtype) @ self.weight).abs(),
               weight=nn.Parameter(weight))  # fmt: skip


def _grows(call, net, rows, labels):
    output = call(rows)
    net.zero_grad()
    return F.cross_entropy(output, labels) * (1 + math.log(len(rows)))


def _in_place_after(call, net, rows, labels):
    output = call(rows)
    output.mul_(2)
    return F.cross_entropy(output, labels)


def _object(self, rows, options):
    return self.net(rows) * options.factor


def _with_object(call, net, rows, labels):
    return F.cross_entropy(call(rows, SimpleNamespace(factor=2.0)), labels)


def _contrastive(call, net, rows, labels):
    features = F.normalize(call(rows), dim=1)
    return F.cross_entropy(
        features @ features.T / 0.1, torch.arange(len(rows), device=rows.device)
    )


PROGRAMS = {
    "mlp": Program(),
    "images": Program(_images),
    "recurrent": Program(_recurrent),
    "attention": Program(_attention),
    "tied weights": Program(_tied),
    "frozen layer": Program(_frozen_first),
    "no bias": Program(lambda: nn.Linear(6, 3, bias=False)),
    "modules in a dict": Program(_modules_in_dict),
    "weight norm": Program(_weight_norm),
    "pruned": Program(_pruned),
    "complex weights": Program(_complex),
    "sparse gradients": Program(_sparse, _looks_up),
    "buffers": Program(_buffers),
    "a layer that some rows use": Program(
        lambda: Own(
            _unused_on_some,
            body=nn.Linear(6, 8),
            head=nn.Linear(8, 3),
            other=nn.Linear(8, 3),
        )
    ),
    "checkpoint inside": Program(_checkpointed(use_reentrant=False)),
    "reentrant checkpoint inside": Program(_checkpointed(use_reentrant=True)),
    "checkpoint around": Program(mlp, _around(use_reentrant=False)),
    "reentrant checkpoint around": Program(mlp, _around(use_reentrant=True)),
    "penalty on parameters": Program(mlp, _penalty),
    "gradient penalty": Program(mlp, _gradient_penalty),
    "two calls in one loss": Program(mlp, _two_calls),
    "two losses of one call": Program(mlp, _two_losses),
    "a call of an output": Program(mlp, _chained),
    "gradients dropped in between": Program(mlp, _grows),
    "written in place": Program(mlp, _in_place_after),
    "contrastive": Program(mlp, _contrastive),
    "keywords": Program(lambda: Own(_named, net=mlp()), _by_name),
    "nested arguments": Program(
        lambda: Own(_of_nested, net=mlp()), _nested_arguments, BY_ENGINE_ALONE
    ),
    "an object": Program(lambda: Own(_object, net=mlp()), _with_object),
    "a number that needs a gradient": Program(
        lambda: Own(_scaled, net=mlp(), temperature=nn.Parameter(torch.tensor(0.7))),
        _scalar_input,
    ),
    "a tuple": Program(
        _returning(lambda output: (output, output.exp())),
        lambda call, net, rows, labels: sum(part.sum() for part in call(rows)),
    ),
    "a dict of lists": Program(
        _returning(lambda output: {"a": [output, output.sin()], "b": 3}),
        lambda call, net, rows, labels: call(rows)["a"][1].square().mean(),
    ),
    "one entry per row": Program(
        _returning(lambda output: output.sum(1)),
        lambda call, net, rows, labels: call(rows).square().mean(),
    ),
    "mean loss inside": Program(_inside("mean"), _own_loss, BY_ENGINE_ALONE),
    "sum loss inside": Program(_inside("sum"), _own_loss, BY_ENGINE_ALONE),
    "mean loss of labels inside": Program(
        _inside("mean"), _own_loss_ignoring, BY_ENGINE_ALONE
    ),
    "sum loss of labels inside": Program(
        _inside("sum"), _own_loss_ignoring, BY_ENGINE_ALONE
    ),
    "left in an attribute": Program(
        lambda: Own(_left_in_attribute, net=mlp()), _reads_attribute, BY_ENGINE_ALONE
    ),
    "left in a list": Program(FillsList, _reads_list, BY_ENGINE_ALONE),
    "a counter": Program(_counter),
    "a mask that the first call makes": Program(
        lambda: Own(_makes_mask, net=mlp(), mask=None)
    ),
    "tables that the first call makes": Program(
        lambda: Own(_makes_tables, net=mlp(), tables={})
    ),
    # Gradients are rounded to bfloat16 in each replica.
    "autocast": Program(mlp, _under_autocast, relative=0.02),
}
# Of the gradients of parameters by ``autograd.grad``: not inside of ``no_sync``.
SELECTING = {
    "Hessian times vector": Program(mlp, _hessian_vector),
    "gradient of one weight": Program(mlp, _selected),
}
