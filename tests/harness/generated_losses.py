"""Losses × batches × ways × layouts × dtypes, each cell drawn, beside plain torch.

A ``Cell`` is a draw of all of them. A loss with what makes it right (``count=``,
``reduction=``, ``whole_batch=``) gives the gradient of plain torch. The same loss
without is refused, told, or right by chance.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

FEATURES, COLUMNS = 4, 3
CLASS_WEIGHTS = (1.0, 2.0, 5.0)
NUMBERS_OF_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 40)
LAYOUTS = (("cpu",), ("cpu",) * 3, ("cpu:0", "cpu:1", "cpu:0"))
# The largest relative error of a right gradient, and the least of a wrong one.
LIMITS = {
    torch.float64: (1e-9, 1e-4),
    torch.float32: (1e-3, 2e-2),
    torch.bfloat16: (1e-1, 4e-1),
}
FACTOR_OF_ROUNDING = 4  # two right gradients are as far apart as one from the exact one
# Of the warnings that say that nobody knows whether a step is right.
WORDS_OF_DOUBT = ("could not check", "do not show whether")


class Network(nn.Module):
    """Gives a value for each row and column, and the size of its weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.last = nn.Linear(5, COLUMNS)

    def forward(self, rows):
        return self.last(self.first(rows).tanh()), self.last.weight.square().mean()


class WithLoss(nn.Module):
    """Returns the loss of a network's output."""

    def __init__(self, network, loss):
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, rows, batch):
        return self.loss(self.network(rows), batch)


# --- losses ---


def squares(output, batch):
    return (output[0] - batch["values"]).square().mean(1)


def over_rows(output, batch):
    return squares(output, batch).mean()


def over_labels(output, batch):
    return F.cross_entropy(output[0], batch["labels"])


def over_class_weights(output, batch):
    weights = output[0].new_tensor(CLASS_WEIGHTS)
    return F.cross_entropy(output[0], batch["labels"], weights)


def over_mask(output, batch):
    return (squares(output, batch) * batch["mask"]).sum() / batch["mask"].sum()


def over_mask_or_one(output, batch):
    number = batch["mask"].sum().clamp(min=1)
    return (squares(output, batch) * batch["mask"]).sum() / number


def over_selected(output, batch):
    return squares(output, batch)[batch["mask"]].mean()


def over_list(output, batch):
    pairs = zip(squares(output, batch), batch["mask"], strict=True)
    losses = [loss for loss, is_counted in pairs if is_counted]
    return sum(losses, 0 * output[0].sum()) / max(1, len(losses))


def over_positive(output, batch):
    """Of a mask that no tensor of the batch has."""
    return squares(output, batch)[batch["values"][:, 0] > 0].mean()


def over_weights(output, batch):
    weights = batch["weights"]
    return (squares(output, batch) * weights).sum() / weights.sum()


def summed(output, batch):
    return (squares(output, batch) * batch["mask"]).sum()


def with_penalty(output, batch):
    return over_rows(output, batch) + 3 * output[1]


def over_rows_and_labels(output, batch):
    return over_rows(output, batch) + over_labels(output, batch)


def over_labels_and_selected(output, batch):
    return over_labels(output, batch) + over_selected(output, batch)


def of_classes(output, batch):
    """A mean over the classes that the labels have."""
    losses = squares(output, batch)
    means = [losses[batch["labels"] == label].mean() for label in range(COLUMNS)]
    means = [mean for mean in means if not mean.isnan()]
    return sum(means, 0 * output[0].sum()) / max(1, len(means))


def ratio(output, batch):
    size = output[0].square().mean(1)
    mask = batch["mask"]
    return (squares(output, batch) * mask).sum() / (size * mask).sum()


def dice(output, batch):
    guess = output[0].sigmoid()
    truth = (batch["values"] > 0).to(guess)
    return 1 - (2 * (guess * truth).sum() + 1) / (guess.sum() + truth.sum() + 1)


def over_large(output, batch):
    """Of the rows whose loss is above a margin."""
    losses = (squares(output, batch) - 0.7).relu()
    return losses.sum() / (losses > 0).sum()


def over_large_or_one(output, batch):
    losses = (squares(output, batch) - 0.7).relu()
    return losses.sum() / (losses > 0).sum().clamp(min=1)


def over_selected_large(output, batch):
    losses = squares(output, batch)
    return losses[losses > 0.7].mean()


def hardest_half(output, batch):
    losses = squares(output, batch)
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def hardest_two(output, batch):
    losses = squares(output, batch)
    return losses.topk(min(2, len(losses))).values.mean()


def median(output, batch):
    return squares(output, batch).median()


def largest(output, batch):
    return squares(output, batch).max()


def root(output, batch):
    return over_rows(output, batch).sqrt()


def logarithm(output, batch):
    return over_rows(output, batch).log()


def of_pairs(output, batch):
    logits = output[0] @ batch["values"].T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def distances(output, batch):
    """Not by themselves: of equal rows their gradient is zero."""
    differences = output[0][:, None] - output[0][None]
    return over_rows(output, batch) - differences.square().sum(2).mean()


def distances_of_others(output, batch):
    num_rows = len(output[0])
    differences = output[0][:, None] - output[0][None]
    pairs = max(1, num_rows * (num_rows - 1))
    return over_rows(output, batch) - differences.square().sum() / pairs


def spread(output, batch):
    return over_rows(output, batch) + output[0].var(0, correction=0).sum()


# --- what makes them right ---


def count_of(key):
    return {"count": lambda _, batch: batch[key].sum()}


def count_labels(_, batch):
    return (batch["labels"] != -100).sum()


def count_class_weights(_, batch):
    weights = torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
    return weights[batch["labels"][batch["labels"] != -100]].sum()


def count_positive(_, batch):
    return (batch["values"][:, 0] > 0).sum()


_COMPARES_ROWS = {"whole_batch": True}
RIGHT: dict[Any, dict[str, Any]] = {
    over_rows: {},
    with_penalty: {},
    over_labels: {"count": count_labels},
    over_class_weights: {"count": count_class_weights},
    over_mask: count_of("mask"),
    over_mask_or_one: count_of("mask"),
    over_selected: count_of("mask"),
    over_list: count_of("mask"),
    over_positive: {"count": count_positive},
    over_weights: count_of("weights"),
    summed: {"reduction": "sum"},
    over_rows_and_labels: _COMPARES_ROWS,
    over_labels_and_selected: _COMPARES_ROWS,
    of_classes: _COMPARES_ROWS,
    ratio: _COMPARES_ROWS,
    dice: _COMPARES_ROWS,
    over_large: _COMPARES_ROWS,
    over_large_or_one: _COMPARES_ROWS,
    over_selected_large: _COMPARES_ROWS,
    hardest_half: _COMPARES_ROWS,
    hardest_two: _COMPARES_ROWS,
    median: _COMPARES_ROWS,
    largest: _COMPARES_ROWS,
    root: _COMPARES_ROWS,
    logarithm: _COMPARES_ROWS,
    of_pairs: _COMPARES_ROWS,
    distances: _COMPARES_ROWS,
    distances_of_others: _COMPARES_ROWS,
    spread: _COMPARES_ROWS,
}
WRONG = [loss for loss, options in RIGHT.items() if options]

# --- batches ---


def ordinary_batch(draw, num_rows):
    batch = {
        "rows": torch.randn(num_rows, FEATURES, dtype=torch.float64),
        "values": torch.randn(num_rows, COLUMNS, dtype=torch.float64),
        "labels": torch.randint(COLUMNS, (num_rows,)),
        "mask": torch.rand(num_rows) < 0.7,
        "weights": torch.rand(num_rows, dtype=torch.float64) + 0.1,
    }
    batch["mask"][0] = True
    return batch


def leave_out(batch, rows):
    batch["mask"][rows] = False
    batch["weights"][rows] = 0
    batch["labels"][rows] = -100


def ordinary(draw, batch):
    pass


def row_without_terms(draw, batch):
    leave_out(batch, draw.randrange(len(batch["mask"])))


def few_terms(draw, batch):
    """Most rows have none, the first ones neither."""
    leave_out(batch, slice(0, -1, draw.randint(1, 2)))
    batch["mask"][-1] = True
    batch["weights"][-1] = 2
    batch["labels"][-1] = 1


def first_rows_without_terms(draw, batch):
    leave_out(batch, slice(0, draw.randrange(len(batch["mask"]))))


def last_rows_without_terms(draw, batch):
    leave_out(batch, slice(draw.randint(1, len(batch["mask"])), None))


def no_terms(draw, batch):
    leave_out(batch, slice(None))


def one_row_of_several_without_terms(draw, batch):
    leave_out(batch, slice(1, None, draw.randint(2, 5)))


def one_row_of_several_with_terms(draw, batch):
    period = draw.randint(2, 5)
    for row in range(len(batch["mask"])):
        if row % period:
            leave_out(batch, row)
        else:
            batch["mask"][row] = True


def equal_terms(draw, batch):
    batch["mask"][:] = True
    batch["weights"][:] = 0.5
    batch["labels"][:] = draw.randrange(COLUMNS)


def equal_rows(draw, batch):
    for name in ("rows", "values"):
        batch[name][:] = batch[name][:1].clone()


def two_groups(draw, batch):
    half = (len(batch["mask"]) + 1) // 2
    names = draw.choice([("rows", "values"), tuple(batch)])
    for name in names:
        batch[name][:half] = batch[name][0].clone()
        batch[name][half:] = batch[name][-1].clone()


def repeated_rows(draw, batch):
    positions = torch.arange(len(batch["mask"])) % draw.randint(1, 3)
    for name, tensor in batch.items():
        batch[name] = tensor[positions]


def sorted_by_mask(draw, batch):
    order = batch["mask"].int().argsort(descending=True, stable=True)
    for name, tensor in batch.items():
        batch[name] = tensor[order]


def zero_rows(draw, batch):
    batch["rows"][:] = 0


def zero_values(draw, batch):
    batch["values"][:] = 0


def zero_value(draw, batch):
    """The loss of the row is zero if the module gives zeros."""
    batch["values"][draw.randrange(len(batch["values"]))] = 0


def huge(draw, batch):
    batch["values"] *= 1e4


def tiny(draw, batch):
    batch["values"] *= 1e-6
    batch["rows"] *= 1e-3


def tiny_weights(draw, batch):
    batch["weights"][draw.randrange(len(batch["weights"]))] = 1e-9


def not_a_number(draw, batch):
    batch["values"][draw.randrange(len(batch["values"]))] = math.nan


def infinite(draw, batch):
    batch["values"][draw.randrange(len(batch["values"]))] = math.inf


CHANGES = (
    ordinary,
    row_without_terms,
    few_terms,
    first_rows_without_terms,
    last_rows_without_terms,
    no_terms,
    one_row_of_several_without_terms,
    one_row_of_several_with_terms,
    equal_terms,
    equal_rows,
    two_groups,
    repeated_rows,
    sorted_by_mask,
    zero_rows,
    zero_values,
    zero_value,
    huge,
    tiny,
    tiny_weights,
    not_a_number,
    infinite,
)

# --- ways to compute a step: each gives the loss, and leaves gradients ---


def by_forward_backward(cell, module, accum, inputs, targets):
    with ScatterOnceParallel(module, accum, list(cell.layout)) as engine:
        return engine.forward_backward(inputs, targets, cell.loss, **cell.options)


def by_loss(cell, module, accum, inputs, targets):
    with ScatterOnceParallel(module, accum, list(cell.layout)) as engine:
        loss = engine.loss(inputs, targets, cell.loss, **cell.options)
        loss.backward()
    return loss


def by_loss_of_module(cell, module, accum, inputs, targets):
    options = dict(cell.options)
    if "count" in options:
        count = options["count"]
        options["count"] = lambda both, _: count(*both)
    with_loss = WithLoss(module, cell.loss)
    with ScatterOnceParallel(with_loss, accum, list(cell.layout)) as engine:
        return engine.forward_backward((inputs, targets), **options)


def by_call(cell, module, accum, inputs, targets):
    with_loss = WithLoss(module, cell.loss)
    with ScatterOnceParallel(with_loss, accum, list(cell.layout)) as engine:
        loss = engine(inputs, targets)
        loss.backward()
    return loss


def by_pair(cell, module, accum, inputs, targets):
    outputs = DataParallelModel(module, list(cell.layout))(inputs)
    criterion = DataParallelCriterion(cell.loss, list(cell.layout))
    loss = criterion(outputs, targets, **cell.options)
    loss.backward()
    return loss


# Each with the options that it has.
WAYS: dict[Any, tuple[str, ...]] = {
    by_forward_backward: ("count", "reduction", "whole_batch"),
    by_loss: ("count", "reduction", "whole_batch"),
    by_loss_of_module: ("count", "reduction"),
    by_call: (),
    by_pair: ("count", "reduction"),
}


@dataclass(frozen=True)
class Cell:
    """What is trained, on what, and where.

    Attributes:
        loss: one of the losses.
        changes: what is special about the batch.
        way: how a step is computed.
        layout: the devices.
        dtype: of module and batch.
        seed: of all that the cell draws.
        is_right: whether the loss has the options that make it right.
    """

    loss: Callable[..., Any]
    changes: tuple[Callable[..., Any], ...]
    way: Callable[..., Any]
    layout: tuple[str, ...]
    dtype: torch.dtype
    seed: int
    is_right: bool = False

    def __str__(self) -> str:
        """Python that makes the cell again."""
        changes = ", ".join(change.__name__ for change in self.changes)
        names = f"{self.loss.__name__}, ({changes},), {self.way.__name__}"
        return (
            f"Cell({names}, {self.layout}, {self.dtype}, {self.seed}, {self.is_right})"
        )

    @property
    def options(self):
        return RIGHT[self.loss] if self.is_right else {}

    def drawn(self):
        """The module, the number of sub-steps, the inputs and the targets."""
        draw = random.Random(self.seed)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            module = Network()
            if draw.random() < 0.08:
                for parameter in module.last.parameters():
                    parameter.data.zero_()
            batch = ordinary_batch(draw, draw.choice(NUMBERS_OF_ROWS))
            for change in self.changes:
                change(draw, batch)
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(self.dtype)
        inputs = batch.pop("rows")
        return module.to(self.dtype), draw.randint(1, 4), inputs, batch

    def outcome(self):
        """``right``, ``refused``, ``told``, ``undefined`` in plain torch, or ``silent``
        and off by some number.
        """
        module, accum, inputs, targets = self.drawn()
        plain = copy.deepcopy(module)
        expected = self.loss(plain(inputs), targets)
        expected.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loss = self.way(self, module, accum, inputs, targets)
            except ValueError as error:
                return "refused", str(error)
        texts = [str(warning.message) for warning in caught]
        if any(words in text for words in WORDS_OF_DOUBT for text in texts):
            return "told", ""
        error = error_of(module, plain)
        largest, least = LIMITS[self.dtype]
        bound = largest if self.is_right else least
        if error <= bound or error <= rounding_of(plain, self.loss, inputs, targets):
            return "right", ""
        if not is_defined(expected, plain):
            return "undefined", ""
        # Right by chance, in a format that rounds much.
        if not self.is_right and self.dtype is not torch.float64:
            in_double, _ = replace(self, dtype=torch.float64).outcome()
            if in_double == "right":
                return "right", ""
        numbers = f"loss {float(loss.detach()):.4g}, not {float(expected.detach()):.4g}"
        return "silent", f"off by {error:.2g}, {numbers}"


def is_defined(loss, plain):
    """Whether plain torch gives a loss, and a gradient that is no rounding alone.

    Without a term its mean is NaN, and a step adds nothing. Of a module that gives
    zeros, pairs of equal rows cancel: what is left is 1e-16.
    """
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    is_finite = all(tensor.isfinite().all() for tensor in (loss, *gradients))
    return is_finite and max(gradient.abs().max() for gradient in gradients) > 1e-12


def rounding_of(plain, loss, inputs, targets):
    """How far the gradient of plain torch is from its own in float64, and more."""
    in_double = copy.deepcopy(plain).double()
    in_double.zero_grad()
    widened = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in targets.items()
    }
    loss(in_double(inputs.double()), widened).backward()
    return FACTOR_OF_ROUNDING * error_of(plain, in_double)


def error_of(module, plain):
    """The largest difference over the largest entry of all gradients."""
    pairs = []
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        gradients = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in (parameter, other)
        ]
        pairs.append(gradients)
    scale = max(float(expected.abs().max()) for _, expected in pairs)
    errors = []
    for gradient, expected in pairs:
        same = (gradient == expected) | (gradient.isnan() & expected.isnan())
        error = (gradient - expected).masked_fill(same, 0).abs().max()
        errors.append(float(error) / max(scale, 1e-30) if error else 0.0)
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def cells(number, dtype, seed, *, is_right):
    """Draw cells: losses take turns, all else is drawn; several changes hide more."""
    draw = random.Random(seed)
    losses = list(RIGHT) if is_right else WRONG
    for position in range(number):
        loss = losses[position % len(losses)]
        options = set(RIGHT[loss]) if is_right else set()
        ways = [way for way, known in WAYS.items() if options <= set(known)]
        yield Cell(
            loss,
            tuple(draw.sample(CHANGES, draw.choice((1, 2, 2, 3)))),
            draw.choice(ways),
            draw.choice(LAYOUTS),
            dtype,
            draw.randrange(2**31),
            is_right,
        )
