"""Random programs in half precision, right and wrong ones, each made from a seed.

::

    model        layers with one of several normalisations; outputs of several sizes
    loss         a mean, a sum, or a mean over labels, of one of several terms per entry
    precision    parameters in half precision, or autocast
    mistake      of wrong programs: a sum for a mean, a count that is missing, …
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# --- terms: one loss per row, of scores (rows, classes) and labels or values ---


def _one_hot(output: Tensor, labels: Tensor) -> Tensor:
    return F.one_hot(labels, output.shape[-1]).to(output.dtype)


def _signs(output: Tensor, labels: Tensor) -> Tensor:
    return 2 * _one_hot(output, labels) - 1


def cross_entropy(output, labels):
    return F.cross_entropy(output, labels, reduction="none")


def smoothed(output, labels):
    return F.cross_entropy(output, labels, reduction="none", label_smoothing=0.1)


def focal(output, labels):
    loss = F.cross_entropy(output, labels, reduction="none")
    return (1 - (-loss).exp()) ** 2 * loss


def hinge(output, labels):
    return F.relu(1 - _signs(output, labels) * output).mean(-1)


def squared_hinge(output, labels):
    return F.relu(1 - _signs(output, labels) * output).square().sum(-1)


def multi_margin(output, labels):
    return F.multi_margin_loss(output.float(), labels, reduction="none")


def crammer_singer(output, labels):
    right = output.gather(1, labels[:, None])
    others = output.masked_fill(_one_hot(output, labels).bool(), -1e4)
    return F.relu(1 + others.amax(1) - right[:, 0])


def soft_margin(output, labels):
    return F.soft_margin_loss(output, _signs(output, labels), reduction="none").mean(-1)


def binary(output, labels):
    return F.binary_cross_entropy_with_logits(
        output, _one_hot(output, labels), reduction="none"
    ).mean(-1)


def squares(output, labels):
    return (output - _one_hot(output, labels)).square().sum(-1)


def absolute(output, labels):
    return (output - _one_hot(output, labels)).abs().mean(-1)


def huber(output, labels):
    return F.huber_loss(
        output, _one_hot(output, labels), reduction="none", delta=0.5
    ).mean(-1)


def divergence(output, labels):
    goal = (_one_hot(output, labels) * 3).softmax(-1)
    return F.kl_div(output.log_softmax(-1), goal, reduction="none").sum(-1)


def cosine(output, labels):
    return 1 - F.cosine_similarity(output, _one_hot(output, labels) + 0.1)


def cancelling(output, labels):
    """Large terms that cancel, and small ones that remain."""
    large = 1000 * output
    return (large - large.detach()).sum(-1) + cross_entropy(output, labels)


def cancelling_constants(output, labels):
    """A large constant is added, and later subtracted."""
    scores = output + 60 * labels[:, None].to(output.dtype)
    return cross_entropy(scores - 60 * labels[:, None].to(output.dtype), labels)


def opposite(output, labels):
    """Rows whose terms have opposite signs, as the advantages of policy gradients."""
    advantages = torch.where(labels % 2 == 0, 1.0, -1.0).to(output.dtype)
    return advantages * output.log_softmax(-1).gather(1, labels[:, None])[:, 0]


TERMS = (
    cross_entropy,
    smoothed,
    focal,
    hinge,
    squared_hinge,
    multi_margin,
    crammer_singer,
    soft_margin,
    binary,
    squares,
    absolute,
    huber,
    divergence,
    cosine,
    cancelling,
    cancelling_constants,
    opposite,
)

# --- losses: how terms are combined, and what the engine is told ---


@dataclass(frozen=True)
class Combination:
    """A way to combine the terms of all rows.

    Attributes:
        combine: the loss of terms, output and labels (-1: ignored).
        options: of ``forward_backward``.
    """

    combine: Callable[[Tensor, Tensor, Tensor], Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def _mean(terms, output, labels):
    return terms.mean()


def _sum(terms, output, labels):
    return terms.sum()


def _mean_over_labels(terms, output, labels):
    counted = labels >= 0
    return (terms * counted).sum() / counted.sum().clamp(min=1)


def _mean_over_zeros(terms, output, labels):
    """A sum over all rows, divided by the number of rows of class zero."""
    return terms.sum() / (labels == 0).sum().clamp(min=1)


def _weighted_mean(terms, output, labels):
    """A mean of terms whose weights depend on the class."""
    weights = _weights(labels)
    return (terms * weights).sum() / weights.sum()


def _centred(terms, output, labels):
    """Large terms of opposite signs in one sum."""
    signs = torch.where(labels % 2 == 0, 1.0, -1.0)
    return (
        terms.mean()
        + (50 * signs * terms).mean()
        - (50 * signs * terms.detach()).mean()
    )


def _spread(terms, output, labels):
    return terms.mean() + (output - output.mean(0)).square().mean()


def _rolled(terms, output, labels):
    """Pairs of neighbouring rows."""
    return terms.mean() + (output * output.roll(1, 0)).mean()


def _contrastive(terms, output, labels):
    scores = F.normalize(output.float()) @ F.normalize(output.float()).T
    return terms.mean() + F.cross_entropy(scores, torch.arange(len(output)))


def _largest(terms, output, labels):
    return terms.max()


def _weights(labels):
    return 1.0 + 3.0 * (labels == 0)


def _count_weights(inputs, labels):
    return _weights(labels).sum()


def _count_labels(inputs, labels):
    return (labels >= 0).sum()


def _count_zeros(inputs, labels):
    return (labels == 0).sum()


RIGHT = (
    Combination(_mean),
    Combination(_centred),
    Combination(_sum, {"reduction": "sum"}),
    Combination(_mean_over_labels, {"count": _count_labels}),
    Combination(_weighted_mean, {"count": _count_weights}),
    Combination(_spread, {"whole_batch": True}),
    Combination(_contrastive, {"whole_batch": True}),
)
WRONG = (
    Combination(_sum),
    Combination(_mean, {"reduction": "sum"}),
    Combination(_mean_over_labels),
    Combination(_mean_over_zeros),
    Combination(_weighted_mean),
    Combination(_mean, {"count": _count_zeros}),
    Combination(_spread),
    Combination(_rolled),
    Combination(_contrastive),
    Combination(_largest),
)

# --- models ---


class Scaled(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs):
        return inputs * self.factor


class Residual(nn.Module):
    """Adds what a body computes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs):
        return inputs + self.body(inputs)


class Convolution(nn.Module):
    """A convolution over the features, then their mean."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 3, padding=1)
        self.norm = norm

    def forward(self, inputs):
        return self.norm(self.first(inputs[:, None]).mean(-1)).relu()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda width: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "batch, no affine": lambda width: nn.BatchNorm1d(width, affine=False),
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "group": lambda width: nn.GroupNorm(2, width),
}
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh)


def _model(draw: random.Random, features: int, num_classes: int) -> nn.Module:
    width = draw.choice((8, 16, 32, 128))
    norm = NORMS[draw.choice(list(NORMS))]
    activation = draw.choice(ACTIVATIONS)
    layers: list[nn.Module] = []
    if draw.random() < 0.2:
        layers.append(Convolution(width, norm(width)))
    else:
        layers += [nn.Linear(features, width), norm(width), activation()]
    for _ in range(draw.choice((0, 1, 2))):
        body = nn.Sequential(nn.Linear(width, width), norm(width), activation())
        layers.append(draw.choice((Residual, lambda body: body))(body))
    if draw.random() < 0.3:
        layers.append(nn.Dropout(0.2))
    layers.append(nn.Linear(width, num_classes))
    if draw.random() < 0.2:
        layers.append(norm(num_classes) if num_classes % 2 == 0 else nn.Identity())
    layers.append(Scaled(draw.choice((0.1, 1.0, 1.0, 10.0, 50.0))))
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Program:
    """A training step in half precision.

    Attributes:
        name: what the program consists of.
        model: with parameters in float32.
        inputs, labels: the batch, in float32.
        terms, combination: the loss.
        dtype: that of half precision.
        is_autocast: parameters and inputs stay in float32, under autocast.
        in_float32: the loss is computed in float32, as most programs do.
        accum: the number of sub-steps per replica.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    terms: Callable[[Tensor, Tensor], Tensor]
    combination: Combination
    dtype: torch.dtype
    is_autocast: bool
    in_float32: bool
    accum: int

    def criterion(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of rows."""
        if self.in_float32 and output.dtype != torch.float64:
            output = output.float()
        terms = self.terms(output, labels.clamp(min=0))
        return self.combination.combine(terms, output, labels)

    def step(
        self, verify: bool = True, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """The gradients of one step on two replicas.

        With ``dtype`` everything is computed in that, in the place of half precision.
        """
        is_autocast = self.is_autocast and dtype is None
        own = torch.float32 if self.is_autocast else self.dtype
        model = self.model.to(dtype or own)
        model.zero_grad()
        if dtype is not None:
            model.eval()  # batch statistics tie rows together
        inputs = self.inputs.to(dtype or own)
        autocast = contextlib.nullcontext()
        if is_autocast:
            autocast = torch.autocast("cpu", self.dtype)
        engine = ScatterOnceParallel(model, self.accum, ["cpu"] * 2, verify=verify)
        with engine, autocast:
            engine.forward_backward(
                inputs, self.labels, self.criterion, **self.combination.options
            )
        model.train()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def plain_gradients(self) -> list[Tensor]:
        """The gradients in float64, in plain torch."""
        model = self.model.double().eval()
        model.zero_grad()
        self.criterion(model(self.inputs.double()), self.labels).backward()
        model.train()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def error(self) -> float:
        """How far the gradient in parts is off, in float64: of the largest entry."""
        actual = self.step(verify=False, dtype=torch.float64)
        expected = self.plain_gradients()
        scale = max(float(gradient.abs().max()) for gradient in expected)
        differences = [
            float((one - other).abs().max())
            for one, other in zip(actual, expected, strict=True)
        ]
        return max(differences) / max(scale, 1e-30)


def _train(model, inputs, labels, terms, steps):
    """Train in float32: near a minimum the gradients of rows cancel each other."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        terms(model(inputs), labels.clamp(min=0)).mean().backward()
        optimizer.step()
    model.eval()
    for _ in range(steps):
        optimizer.zero_grad()
        terms(model(inputs), labels.clamp(min=0)).mean().backward()
        optimizer.step()
    model.train()


def program(seed: int, is_right: bool) -> Program:
    """The program of a seed."""
    draw = random.Random(f"{seed} {is_right}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rows = draw.choice((12, 16, 23, 32, 48, 64))
        features = draw.choice((4, 8, 16))
        num_classes = draw.choice((2, 3, 4, 6))
        model = _model(draw, features, num_classes)
        inputs = draw.choice((0.3, 1.0, 1.0, 4.0)) * torch.randn(rows, features)
        labels = torch.randint(num_classes, (rows,))
        ignored = torch.rand(rows) < torch.linspace(0, 0.7, rows)
        labels[ignored] = -1
        labels[0] = 0
        terms = draw.choice(TERMS)
        _train(model, inputs, labels, terms, steps=draw.choice((0, 0, 20, 200)))
    combination = draw.choice(RIGHT if is_right else WRONG)
    precision = draw.choice(list(DTYPES))
    is_autocast = draw.random() < 0.4
    in_float32 = draw.random() < 0.4
    norms = {
        type(layer).__name__ for layer in model.modules() if "Norm" in str(type(layer))
    }
    name = (
        f"{seed}: {terms.__name__} {combination.combine.__name__.strip('_')} "
        f"{precision}{' autocast' * is_autocast}{' float32 loss' * in_float32} "
        f"{' '.join(sorted(norms))}"
    )
    return Program(
        name=name,
        model=model,
        inputs=inputs,
        labels=labels,
        terms=terms,
        combination=combination,
        dtype=DTYPES[precision],
        is_autocast=is_autocast,
        in_float32=in_float32,
        accum=draw.choice((1, 2, 3)),
    )
