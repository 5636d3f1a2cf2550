"""Programs of ``programs``: other modules, outputs and losses that are computed inside."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from calls.programs import BY_ENGINE_ALONE, Own, Program, mlp

# ---- modules ----


class LowRank(nn.Module):
    """A frozen layer, and a trained product beside it: LoRA."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features))
        self.up = nn.Parameter(torch.randn(layer.out_features, 2))

    def forward(self, rows):
        return self.layer(rows) + rows @ self.down.T @ self.up.T


def _low_rank():
    net = mlp().requires_grad_(False)
    net[0] = LowRank(net[0])
    return net


def _head_of_a_frozen_root():
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    net.eval().requires_grad_(False)
    net[2].requires_grad_(True)
    return net


def _orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3))


def _spectral():
    layer = parametrizations.spectral_norm(nn.Linear(6, 8))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def _symmetric():
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    return net


def _weight_norm_by_hook():
    net = mlp()
    nn.utils.weight_norm(net[0])
    return net


def _experts():
    def forward(self, rows):
        number = (rows.detach().sum(1) > 0).long()
        output = rows.new_zeros(len(rows), 3)
        for expert, layer in enumerate(self.layers):
            chosen = number == expert
            output = output.index_put((chosen,), layer(rows[chosen]))
        return output

    return Own(forward, layers=nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]))


def _transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, rows):
        return self.head(self.encoder(rows[:, :, None] * self.scale).mean(1))

    return Own(
        forward,
        encoder=encoder,
        scale=nn.Parameter(torch.linspace(0.1, 1, 4)),
        head=nn.Linear(4, 3),
    )


def _language_model():
    """Its embedding is its last layer, too."""
    table = nn.Embedding(7, 5)
    head = nn.Linear(5, 7, bias=False)
    head.weight = table.weight
    net = Own(lambda self, tokens: self.head(self.table(tokens).tanh()), table=table)
    net.head = head
    return net


def _next_token(call, net, rows, labels):
    tokens = (labels[:, None] * 5 + torch.arange(4, device=labels.device)) % 7
    output = call(tokens)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _bags():
    table = nn.EmbeddingBag(9, 5, mode="sum", sparse=True)
    return Own(lambda self, ids: self.head(self.table(ids)), table=table,
               head=nn.Linear(5, 3))  # fmt: skip


def _of_bags(call, net, rows, labels):
    return F.cross_entropy(call(torch.stack([labels, labels + 4], 1)), labels)


def _parameter_lists():
    def forward(self, rows):
        for weight in self.weights:
            rows = (rows @ weight).tanh()
        return rows @ self.named["last"]

    weights = [nn.Parameter(torch.randn(6, 6)) for _ in range(2)]
    named = {"last": nn.Parameter(torch.randn(6, 3))}
    return Own(
        forward, weights=nn.ParameterList(weights), named=nn.ParameterDict(named)
    )


def _unregistered():
    """A list of blocks that no container of torch's holds."""

    def forward(self, rows):
        for layer in self.blocks:
            rows = layer(rows).tanh()
        return self.head(rows)

    shared = nn.Linear(6, 6)
    net = Own(forward, head=nn.Linear(6, 3), shared=shared)
    net.blocks = [shared, shared]
    return net


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.save_for_backward(rows)
        return 2 * rows.sin()

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        return 2 * rows.cos() * gradient


def _own_function():
    return Own(lambda self, rows: self.net(Doubled.apply(rows)), net=mlp())


def _normalised():
    return nn.Sequential(
        nn.LayerNorm(6),
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2, affine=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def _channels_last():
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.Hardtanh(inplace=True),
        nn.Conv2d(4, 3, 2),
        nn.Flatten(2),
    )
    net = net.to(memory_format=torch.channels_last)
    return Own(lambda self, rows: self.net(rows).mean(2), net=net)


def _changing_hooks():
    net = mlp()
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net[0].register_forward_hook(lambda module, args, output: output.sin())
    net[2].register_full_backward_hook(lambda module, given, came: (given[0] * 3,))
    return net


def _scaling_hooks():
    net = mlp()
    net[0].weight.register_hook(lambda gradient: gradient * 3)
    return net


def _clamping_hooks():
    """Not linear: they have to see the sum."""
    net = mlp()
    net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    net[2].weight.register_post_accumulate_grad_hook(_clamp)
    return net


def _clamp(weight):
    weight.grad.clamp_(-0.01, 0.01)


MODULES = {
    "LoRA": Program(_low_rank),
    "head of a frozen root": Program(_head_of_a_frozen_root),
    "orthogonal weight": Program(_orthogonal),
    "spectral norm": Program(_spectral),
    "symmetric weight": Program(_symmetric),
    "weight norm by a hook": Program(_weight_norm_by_hook),
    "experts that rows choose": Program(_experts),
    "transformer": Program(_transformer),
    "language model with tied weights": Program(_language_model, _next_token),
    "sparse gradients of bags": Program(_bags, _of_bags),
    "lists and dicts of parameters": Program(_parameter_lists),
    "blocks in a plain list": Program(_unregistered),
    "a function of autograd's": Program(_own_function),
    "normalised by row": Program(_normalised),
    "channels last, in place": Program(_channels_last),
    "hooks that change values": Program(_changing_hooks),
    "hooks that scale a gradient": Program(_scaling_hooks),
}
CLAMPED = {"hooks that clamp gradients": Program(_clamping_hooks)}

# ---- outputs ----

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    loss: Any = None
    logits: Any = None
    others: Any = None


class ModelOutput(OrderedDict):
    """Entries that are attributes, too, as in transformers."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def _returns(build):
    def forward(self, *args, **kwargs):
        return build(self.net, *args, **kwargs)

    return lambda: Own(forward, net=mlp())


def _loss_and_logits(kind, reduction="mean"):
    def build(net, rows, labels):
        output = net(rows)
        loss = F.cross_entropy(output, labels, reduction=reduction)
        return kind(loss=loss, logits=output)

    return _returns(build)


def _reads_both(call, net, rows, labels):
    output = call(rows, labels)
    return output.loss + output.logits.square().mean()


def _reads_loss(call, net, rows, labels):
    return call(rows, labels).loss


def _ignored_later(call, net, rows, labels):
    """Labels are ignored from the second call on."""
    if len(rows) > 9:
        labels = labels.clone()
        labels[: len(labels) // 3] = -100
    return call(rows, labels).loss


def _tuple_with_loss(net, rows, labels):
    output = net(rows)
    return F.cross_entropy(output, labels), output


def _shifted_loss(net, rows, labels):
    logits = net(rows)[:, None].expand(-1, 4, -1) * torch.arange(1, 5).to(rows)[:, None]
    return {
        "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        "logits": logits,
    }


def _of_shifted(call, net, rows, labels):
    tokens = labels[:, None].repeat(1, 4)
    tokens[: len(tokens) // 2, 0] = -100  # does not count
    tokens[len(tokens) // 3 :, 2:] = -100
    return call(rows, tokens)["loss"]


def _penalised(net, rows, labels):
    penalty = sum(parameter.square().sum() for parameter in net.parameters())
    return F.cross_entropy(net(rows), labels) + 0.01 * penalty


def _features_and_scale(self, rows):
    return F.normalize(self.net(rows), dim=1), self.scale.exp()


def _clip(call, net, rows, labels):
    features, scale = call(rows)
    return F.cross_entropy(scale * features @ features.T, labels % len(rows))


def _with_codebook(self, rows):
    return self.net(rows), self.book


def _nearest(call, net, rows, labels):
    output, book = call(rows)
    return (torch.cdist(output, book).square().mean(1)).mean()


def _views(net, rows):
    output = net(rows)
    return output.T.unbind()[0], output[:, 1:], output[:, None].expand(-1, 2, -1)


def _of_views(call, net, rows, labels):
    return sum((k + 1) * part.square().mean() for k, part in enumerate(call(rows)))


def _with_numbers(net, rows):
    output = net(rows)
    return {"scores": output, "best": output.argmax(1), "rows": rows, "name": "a"}


def _of_scores(call, net, rows, labels):
    output = call(rows)
    assert output["name"] == "a"
    assert len(output["rows"]) == len(rows)
    return F.cross_entropy(output["scores"], output["best"])


def _masked(net, rows, mask, scale=None, name=""):
    output = net(rows * mask)
    return output if scale is None else output * scale


def _mixed_arguments(call, net, rows, labels):
    output = call(rows, mask=rows > 0, scale=torch.tensor(2.0).to(rows), name="b")
    return F.cross_entropy(output, labels)


OUTPUTS = {
    "a named tuple": Program(
        _returns(lambda net, rows: Pair(net(rows), net(rows.sin()))),
        lambda call, net, rows, labels: (call(rows).first * 2).square().mean(),
    ),
    "a dataclass with a loss": Program(
        _loss_and_logits(Output), _reads_both, BY_ENGINE_ALONE
    ),
    "a dataclass whose logits nobody reads": Program(
        _loss_and_logits(Output), _reads_loss, BY_ENGINE_ALONE
    ),
    "a model output": Program(
        _loss_and_logits(ModelOutput), _reads_both, BY_ENGINE_ALONE
    ),
    "a model output whose loss is a sum": Program(
        _loss_and_logits(ModelOutput, "sum"), _reads_both, BY_ENGINE_ALONE
    ),
    "labels are ignored later": Program(
        _loss_and_logits(Output), _ignored_later, BY_ENGINE_ALONE
    ),
    "labels of a sum are ignored later": Program(
        _loss_and_logits(Output, "sum"), _ignored_later, BY_ENGINE_ALONE
    ),
    "a tuple with a loss": Program(
        _returns(_tuple_with_loss),
        lambda call, net, rows, labels: call(rows, labels)[0],
        BY_ENGINE_ALONE,
    ),
    "a loss alone": Program(
        _returns(lambda net, rows, labels: F.cross_entropy(net(rows), labels)),
        lambda call, net, rows, labels: call(rows, labels),
        BY_ENGINE_ALONE,
    ),
    "a loss of shifted labels": Program(
        _returns(_shifted_loss), _of_shifted, BY_ENGINE_ALONE
    ),
    "a loss with a penalty inside": Program(
        _returns(_penalised),
        lambda call, net, rows, labels: call(rows, labels),
        BY_ENGINE_ALONE,
    ),
    "a scale beside features": Program(
        lambda: Own(
            _features_and_scale, net=mlp(), scale=nn.Parameter(torch.tensor(0.3))
        ),
        _clip,
        BY_ENGINE_ALONE,
    ),
    "a parameter beside rows": Program(
        lambda: Own(_with_codebook, net=mlp(), book=nn.Parameter(torch.randn(5, 3))),
        _nearest,
        BY_ENGINE_ALONE,
    ),
    "views": Program(_returns(_views), _of_views),
    "integers beside scores": Program(_returns(_with_numbers), _of_scores),
    "both kinds of arguments": Program(_returns(_masked), _mixed_arguments),
}
