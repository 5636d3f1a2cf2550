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
from collections.abc import Callable, Sequence
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
    margins = 1 - _signs(output, labels) * output
    return F.relu(margins).mean(-1)


def squared_hinge(output, labels):
    margins = 1 - _signs(output, labels) * output
    return F.relu(margins).square().sum(-1)


def multi_margin(output, labels):
    return F.multi_margin_loss(output.float(), labels, reduction="none")


def crammer_singer(output, labels):
    right = output.gather(1, labels[:, None])
    is_right = _one_hot(output, labels).bool()
    wrong = output.masked_fill(is_right, -1e4)
    margins = 1 + wrong.amax(1) - right[:, 0]
    return F.relu(margins)


def soft_margin(output, labels):
    signs = _signs(output, labels)
    losses = F.soft_margin_loss(output, signs, reduction="none")
    return losses.mean(-1)


def binary(output, labels):
    goal = _one_hot(output, labels)
    losses = F.binary_cross_entropy_with_logits(output, goal, reduction="none")
    return losses.mean(-1)


def squares(output, labels):
    difference = output - _one_hot(output, labels)
    return difference.square().sum(-1)


def absolute(output, labels):
    difference = output - _one_hot(output, labels)
    return difference.abs().mean(-1)


def huber(output, labels):
    goal = _one_hot(output, labels)
    losses = F.huber_loss(output, goal, reduction="none", delta=0.5)
    return losses.mean(-1)


def divergence(output, labels):
    goal = (_one_hot(output, labels) * 3).softmax(-1)
    losses = F.kl_div(output.log_softmax(-1), goal, reduction="none")
    return losses.sum(-1)


def cosine(output, labels):
    return 1 - F.cosine_similarity(output, _one_hot(output, labels) + 0.1)


def cancelling(output, labels):
    """Large terms that cancel, and small ones that remain."""
    large = 1000 * output
    zeros = large - large.detach()
    return zeros.sum(-1) + cross_entropy(output, labels)


def cancelling_constants(output, labels):
    """A large constant is added, and later subtracted."""
    constants = 60 * labels[:, None].to(output.dtype)
    scores = output + constants
    return cross_entropy(scores - constants, labels)


def opposite(output, labels):
    """Rows whose terms have opposite signs, as the advantages of policy gradients."""
    advantages = torch.where(labels % 2 == 0, 1.0, -1.0).to(output.dtype)
    log_probabilities = output.log_softmax(-1)
    chosen = log_probabilities.gather(1, labels[:, None])
    return advantages * chosen[:, 0]


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
    large = (50 * signs * terms).mean()
    same_number = (50 * signs * terms.detach()).mean()
    return terms.mean() + large - same_number


def _spread(terms, output, labels):
    differences = output - output.mean(0)
    return terms.mean() + differences.square().mean()


def _rolled(terms, output, labels):
    """Pairs of neighbouring rows."""
    products = output * output.roll(1, 0)
    return terms.mean() + products.mean()


def _contrastive(terms, output, labels):
    rows = F.normalize(output.float())
    scores = rows @ rows.T
    partners = torch.arange(len(output))
    return terms.mean() + F.cross_entropy(scores, partners)


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
        features = self.first(inputs[:, None])
        means = features.mean(-1)
        return self.norm(means).relu()


def _no_norm(width: int) -> nn.Module:
    return nn.Identity()


def _batch_norm_without_weight(width: int) -> nn.Module:
    return nn.BatchNorm1d(width, affine=False)


def _norm_of_halves(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


NORMS: Sequence[Callable[[int], nn.Module]] = (
    _no_norm,
    nn.BatchNorm1d,
    _batch_norm_without_weight,
    nn.LayerNorm,
    nn.RMSNorm,
    _norm_of_halves,
)
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh)


def _model(draw: random.Random, features: int, num_classes: int) -> nn.Module:
    width = draw.choice((8, 16, 32, 128))
    norm = draw.choice(NORMS)
    activation = draw.choice(ACTIVATIONS)
    layers: list[nn.Module] = []
    if draw.random() < 0.2:
        layers.append(Convolution(width, norm(width)))
    else:
        layers += [nn.Linear(features, width), norm(width), activation()]
    for _ in range(draw.choice((0, 1, 2))):
        body = nn.Sequential(nn.Linear(width, width), norm(width), activation())
        is_residual = draw.choice((True, False))
        layers.append(Residual(body) if is_residual else body)
    if draw.random() < 0.3:
        layers.append(nn.Dropout(0.2))
    layers.append(nn.Linear(width, num_classes))
    has_last_norm = draw.random() < 0.2
    if has_last_norm and num_classes % 2 == 0:  # groups are halves
        layers.append(norm(num_classes))
    factor = draw.choice((0.1, 1.0, 1.0, 10.0, 50.0))
    layers.append(Scaled(factor))
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
        if dtype is not None:
            computed_in = dtype
        elif is_autocast:
            computed_in = torch.float32
        else:
            computed_in = self.dtype
        model = self.model.to(computed_in)
        model.zero_grad()
        if dtype is not None:
            model.eval()  # batch statistics tie rows together
        inputs = self.inputs.to(computed_in)
        autocast = contextlib.nullcontext()
        if is_autocast:
            autocast = torch.autocast("cpu", self.dtype)
        engine = ScatterOnceParallel(model, self.accum, ["cpu"] * 2, verify=verify)
        options = self.combination.options
        try:
            with engine, autocast:
                engine.forward_backward(inputs, self.labels, self.criterion, **options)
        finally:
            model.train()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def plain_gradients(self) -> list[Tensor]:
        """The gradients in float64, in plain torch."""
        model = self.model.double().eval()
        model.zero_grad()
        output = model(self.inputs.double())
        self.criterion(output, self.labels).backward()
        model.train()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def error(self) -> float:
        """How far the gradient in parts is off, in float64: of the largest entry."""
        actual = self.step(verify=False, dtype=torch.float64)
        expected = self.plain_gradients()
        scale = max(_largest_entry(gradient) for gradient in expected)
        differences = []
        for gradient, expected_gradient in zip(actual, expected, strict=True):
            differences.append(_largest_entry(gradient - expected_gradient))
        return max(differences) / max(scale, 1e-30)


def _largest_entry(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _train(model, inputs, labels, terms, steps):
    """Train in float32: near a minimum the gradients of rows cancel each other."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    labels = labels.clamp(min=0)
    for is_training in (True, False):
        model.train(is_training)
        for _ in range(steps):
            optimizer.zero_grad()
            losses = terms(model(inputs), labels)
            losses.mean().backward()
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
        size = draw.choice((0.3, 1.0, 1.0, 4.0))
        inputs = size * torch.randn(rows, features)
        labels = torch.randint(num_classes, (rows,))
        ignored = torch.rand(rows) < torch.linspace(0, 0.7, rows)
        labels[ignored] = -1
        labels[0] = 0
        terms = draw.choice(TERMS)
        steps = draw.choice((0, 0, 20, 200))
        _train(model, inputs, labels, terms, steps)
    combination = draw.choice(RIGHT if is_right else WRONG)
    precision = draw.choice(list(DTYPES))
    is_autocast = draw.random() < 0.4
    in_float32 = draw.random() < 0.4
    words = [f"{seed}:", terms.__name__, combination.combine.__name__, precision]
    if is_autocast:
        words.append("autocast")
    if in_float32:
        words.append("float32 loss")
    classes = {type(layer).__name__ for layer in model.modules()}
    words += sorted(name for name in classes if "Norm" in name)
    return Program(
        name=" ".join(words),
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
