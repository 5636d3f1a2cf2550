"""Losses × batches × layouts × dtypes, drawn anew in each slow run, beside plain torch.

A loss with what makes it right (``count=``, ``reduction=``, ``whole_batch=``) gives the
gradient of plain torch, and is not refused. The same loss without is refused, told, or
right by chance. A cell is a draw of all of them; its name has what was drawn.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness.pairwise import few_of
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

FEATURES, COLUMNS = 4, 3
LAYOUTS = (["cpu"], ["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:0"])
# The largest relative error of a right gradient, and the least of a wrong one.
LIMITS = {
    torch.float64: (1e-9, 1e-4),
    torch.float32: (1e-3, 2e-2),
    torch.bfloat16: (1e-1, 4e-1),
}

FACTOR_OF_ROUNDING = 4  # two right gradients are as far apart as one from the exact one


class Network(nn.Module):
    """Gives a value for each row and column, and the size of its weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.last = nn.Linear(5, COLUMNS)

    def forward(self, rows):
        return self.last(self.first(rows).tanh()), self.last.weight.square().mean()


# --- losses, each with what makes it right ---


def squares(output, batch):
    return (output[0] - batch["values"]).square().mean(1)


def over_rows(output, batch):
    return squares(output, batch).mean()


def over_labels(output, batch):
    return F.cross_entropy(output[0], batch["labels"])


def over_mask(output, batch):
    return (squares(output, batch) * batch["mask"]).sum() / batch["mask"].sum()


def over_selected(output, batch):
    return squares(output, batch)[batch["mask"]].mean()


def over_weights(output, batch):
    weights = batch["weights"]
    return (squares(output, batch) * weights).sum() / weights.sum()


def summed(output, batch):
    return (squares(output, batch) * batch["mask"]).sum()


def with_penalty(output, batch):
    return over_rows(output, batch) + 3 * output[1]


def ratio(output, batch):
    size = output[0].square().mean(1)
    mask = batch["mask"]
    return (squares(output, batch) * mask).sum() / (size * mask).sum()


def of_pairs(output, batch):
    logits = output[0] @ batch["values"].T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def spread(output, batch):
    return over_rows(output, batch) + output[0].var(0, correction=0).sum()


def count_of(key):
    return {"count": lambda _, batch: batch[key].sum()}


def count_labels(_, batch):
    return (batch["labels"] != -100).sum()


RIGHT: dict[Any, dict[str, Any]] = {
    over_rows: {},
    over_labels: {"count": count_labels},
    over_mask: count_of("mask"),
    over_selected: count_of("mask"),
    over_weights: count_of("weights"),
    summed: {"reduction": "sum"},
    with_penalty: {},
    ratio: {"whole_batch": True},
    of_pairs: {"whole_batch": True},
    spread: {"whole_batch": True},
}
WRONG = [loss for loss, options in RIGHT.items() if options]

# --- batches ---


def ordinary(draw, batch):
    pass


def row_without_terms(draw, batch):
    row = draw.randrange(len(batch["mask"]))
    batch["mask"][row] = False
    batch["weights"][row] = 0
    batch["labels"][row] = -100


def few_terms(draw, batch):
    """Most rows have none, the first ones neither."""
    for row in range(len(batch["mask"]) - 1):
        row_without_terms(random.Random(row), batch)
    batch["mask"][-1] = True
    batch["weights"][-1] = 2
    batch["labels"][-1] = 1


def first_rows_without_terms(draw, batch):
    size = draw.randint(1, len(batch["mask"]) - 1) if len(batch["mask"]) > 1 else 0
    batch["mask"][:size] = False
    batch["weights"][:size] = 0
    batch["labels"][:size] = -100


def no_terms(draw, batch):
    batch["mask"][:] = False
    batch["weights"][:] = 0
    batch["labels"][:] = -100


def equal_rows(draw, batch):
    for name in ("rows", "values"):
        batch[name][:] = batch[name][:1].clone()


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
    no_terms,
    equal_rows,
    huge,
    tiny,
    tiny_weights,
    not_a_number,
    infinite,
)


@dataclass(frozen=True)
class Cell:
    """What is trained, on what, and where."""

    loss: Any
    is_right: bool
    change: Any
    layout: list[str]
    dtype: torch.dtype
    seed: int

    def __str__(self):
        name = f"{self.loss.__name__}, {self.change.__name__}, {self.layout}"
        way = "right" if self.is_right else "wrong"
        return f"{way}: {name}, {self.dtype}, seed {self.seed}"

    def batch(self, draw):
        """Rows of a ragged batch, or a single one."""
        num_rows = draw.choice((1, 2, 5, 7, 9, 12, 13, 17, 24))
        batch = {
            "rows": torch.randn(num_rows, FEATURES, dtype=torch.float64),
            "values": torch.randn(num_rows, COLUMNS, dtype=torch.float64),
            "labels": torch.randint(COLUMNS, (num_rows,)),
            "mask": torch.rand(num_rows) < 0.7,
            "weights": torch.rand(num_rows, dtype=torch.float64) + 0.1,
        }
        batch["mask"][0] = True
        self.change(draw, batch)
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(self.dtype)
        return batch.pop("rows"), batch

    def outcome(self):
        """``right``, ``refused``, ``told``, ``undefined`` in plain torch, or ``silent``
        and off by some number.
        """
        draw = random.Random(str(self))
        with torch.random.fork_rng():
            torch.manual_seed(draw.randrange(2**31))
            module = Network().to(self.dtype)
            inputs, targets = self.batch(draw)
        accum = draw.randint(1, 4)
        plain = copy.deepcopy(module)
        self.loss(plain(inputs), targets).backward()
        options = RIGHT[self.loss] if self.is_right else {}
        with (
            ScatterOnceParallel(module, accum, self.layout) as engine,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            try:
                engine.forward_backward(inputs, targets, self.loss, **options)
            except ValueError as error:
                return "refused", str(error)
        if any("could not check" in str(warning.message) for warning in caught):
            return "told", ""
        error = error_of(module, plain)
        largest, least = LIMITS[self.dtype]
        bound = largest if self.is_right else least
        if error <= bound or error <= self._rounding(plain, inputs, targets):
            return "right", ""
        is_defined = all(p.grad.isfinite().all() for p in plain.parameters())
        # Without a term torch's mean is NaN, and a step adds nothing.
        return "silent" if is_defined else "undefined", f"off by {error:.2g}"

    def _rounding(self, plain, inputs, targets):
        """How far the gradient of plain torch is from its own in float64, and more."""
        in_double = copy.deepcopy(plain).double()
        in_double.zero_grad()
        widened = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in targets.items()
        }
        self.loss(in_double(inputs.double()), widened).backward()
        return FACTOR_OF_ROUNDING * error_of(plain, in_double)


def error_of(module, plain):
    """The largest difference over the largest entry of all gradients."""
    pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
    scale = max(float(other.grad.abs().max()) for _, other in pairs)
    errors = []
    for parameter, other in pairs:
        gradient = torch.zeros_like(other) if parameter.grad is None else parameter.grad
        same = (gradient == other.grad) | (gradient.isnan() & other.grad.isnan())
        error = (gradient - other.grad).masked_fill(same, 0).abs().max()
        errors.append(float(error) / max(scale, 1e-30) if error else 0.0)
    return math.inf if any(map(math.isnan, errors)) else max(errors)


# Drawn anew in each slow run: its name tells the seed of a cell that fails.
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, None))]


def cells(losses, is_right, dtype, seed):
    """Each loss with each change, in layouts that take turns."""
    seed = seed or random.SystemRandom().randrange(2**31)
    layouts = itertools.cycle(LAYOUTS)
    for loss, change in itertools.product(losses, CHANGES):
        yield Cell(loss, is_right, change, next(layouts), dtype, seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", few_of(LIMITS, [torch.float64]))
@pytest.mark.parametrize("seed", SEEDS)
def test_right_losses_equal_plain_torch(dtype, seed):
    bad = []
    for cell in cells(RIGHT, True, dtype, seed):
        outcome, words = cell.outcome()
        if outcome in ("silent", "refused"):
            bad.append(f"{cell}: {outcome}, {words}")
    assert not bad, "\n".join(bad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", few_of(LIMITS, [torch.float64]))
@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_losses_are_not_silent(dtype, seed):
    bad = []
    for cell in cells(WRONG, False, dtype, seed):
        outcome, words = cell.outcome()
        if outcome == "silent":
            bad.append(f"{cell}: {outcome}, {words}")
    assert not bad, "\n".join(bad)
