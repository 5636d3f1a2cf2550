"""Losses that are no mean over rows, on batches in which rows have no term.

Each is refused, or a warning says that it could not be checked. It may be right by
chance. Wrong and silent is the one outcome that no cell of the table has.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from harness.pairwise import pairwise
from torch import nn
from torch.nn import functional as F

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    splitcheck,
)

FEATURES, COLUMNS = 6, 5
LARGEST_ERROR = 1e-3  # of a gradient that is right, in float32, too
LAYOUTS = {"shared": ["cpu"] * 2, "virtual": ["cpu:0", "cpu:1"]}


# --- losses, whose terms are the targets above 0.9 ---


def is_term(targets):
    return targets.abs() > 0.9


def squares(output, targets):
    return (output - targets).square() * is_term(targets)


def ratio(output, targets):
    return squares(output, targets).sum() / is_term(targets).sum()


def ratio_that_is_never_zero(output, targets):
    """A row without a term is zero by itself."""
    return squares(output, targets).sum() / (is_term(targets).sum() + 1e-8)


def ratio_of_all_entries(output, targets):
    """A row without a term is 100,000,000 times as large by itself."""
    size = (output - targets).square().sum()
    return size / (is_term(targets).sum() + 1e-8)


def ratio_by_small_weights(output, targets):
    weights = torch.where(is_term(targets), 1.0, 1e-12).to(output)
    return (output - targets).square().sum() / weights.sum()


def selected(output, targets):
    terms = is_term(targets)
    return F.mse_loss(output[terms], targets[terms])


def with_an_infinity(output, targets):
    """The loss of a row without a term is infinite, and its gradient is not."""
    number = is_term(targets).sum()
    return squares(output, targets).sum() / number.clamp(min=1) - number.log()


def ratio_and_an_infinity(output, targets):
    terms = is_term(targets).to(output)
    return (output * terms).sum() / terms.sum() + 1 / terms.sum()


def dice(output, targets):
    terms = is_term(targets).to(output)
    overlap = (output.sigmoid() * terms).sum()
    return 1 - 2 * overlap / (terms.sum() + overlap)


def root_of_a_mean(output, targets):
    """The gradient of a row without a term is 0 / 0."""
    return squares(output, targets).mean().sqrt()


def logarithm_of_a_mean(output, targets):
    return squares(output, targets).mean().log()


def variance(output, targets):
    return output[is_term(targets)].var()


def largest(output, targets):
    return squares(output, targets).max()


def of_pairs(output, targets):
    distances = torch.cdist(output, output).square()
    return distances.mean() * is_term(targets).to(output).mean()


def labels_of(targets):
    labels = is_term(targets).int().argmax(1)
    labels[~is_term(targets).any(1)] = -100
    return labels


def ignored_labels(output, targets):
    return F.cross_entropy(output, labels_of(targets))


def class_weights(output, targets):
    """The class of a row without a term has no weight."""
    weights = torch.arange(float(COLUMNS)).to(output)
    labels = is_term(targets).sum(1).clamp(max=COLUMNS - 1)
    return F.cross_entropy(output, labels, weight=weights)


def mean_of_rows_with_terms(output, targets):
    rows = squares(output, targets).sum(1) / is_term(targets).sum(1)
    return rows.nanmean()


def total(output, targets):
    return squares(output, targets).sum()


LOSSES = (
    ratio,
    ratio_that_is_never_zero,
    ratio_of_all_entries,
    ratio_by_small_weights,
    selected,
    with_an_infinity,
    ratio_and_an_infinity,
    dice,
    root_of_a_mean,
    logarithm_of_a_mean,
    variance,
    largest,
    of_pairs,
    ignored_labels,
    class_weights,
    mean_of_rows_with_terms,
    total,
)

# --- batches: the number of terms of each row ---

BATCHES = {
    "a row without a term": [2, 1, 3, 2, 3, 2, 2, 3, 1, 1, 2, 2, 0, 2, 4, 3],
    "two rows without": [2, 1, 3, 2, 3, 2, 2, 3, 1, 1, 2, 2, 0, 2, 0, 3],
    "first rows without": [0, 0, 3, 2, 3, 2, 2, 3, 1, 1, 2, 2, 4, 2, 4, 3],
    "a micro-batch without": [2, 1, 3, 2, 0, 0, 0, 0, 1, 5, 2, 2, 1, 2, 4, 3],
    "the first micro-batch without": [0, 0, 0, 0, 3, 2, 2, 3, 1, 1, 2, 2, 4, 2, 4, 3],
    "most rows without": [0, 0, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 3, 0, 0, 0],
    "one term": [0] * 7 + [1] + [0] * 8,
    "more rows than a look has": ([0] * 12 + [3, 2, 1, 4]) * 8,
}


def batch(name, dtype):
    generator = torch.Generator().manual_seed(3)
    terms = torch.tensor(BATCHES[name])
    shape = len(terms), COLUMNS
    targets = torch.rand(shape, generator=generator, dtype=torch.float64)
    is_above = torch.arange(COLUMNS) < terms[:, None]
    targets = torch.where(is_above, 1 + targets, 0.8 * targets)
    inputs = torch.randn(len(terms), FEATURES, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def network(dtype):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, COLUMNS)]
    return nn.Sequential(*layers).to(dtype)


# --- ways to train ---


def forward_backward(module, inputs, targets, loss, layout):
    with ScatterOnceParallel(module, 2, layout) as engine:
        engine.forward_backward(inputs, targets, loss)


def returned_loss(module, inputs, targets, loss, layout):
    with ScatterOnceParallel(module, 2, layout) as engine:
        engine.loss(inputs, targets, loss).backward()


def pair(module, inputs, targets, loss, layout):
    outputs = DataParallelModel(module, layout)(inputs)
    DataParallelCriterion(loss, layout)(outputs, targets).backward()


WAYS = (forward_backward, returned_loss, pair)


def error_of(module, plain):
    """The largest relative difference; infinite if only one of the two is finite."""
    worst = 0.0
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        if not torch.equal(parameter.grad.isfinite(), other.grad.isfinite()):
            return math.inf
        expected = other.grad.nan_to_num(0, 0, 0)
        error = (parameter.grad.nan_to_num(0, 0, 0) - expected).norm()
        worst = max(worst, float(error / expected.norm().clamp(min=1e-12)))
    return worst


@pytest.mark.filterwarnings("ignore:var..")
@pytest.mark.parametrize(
    "layout", ["shared", pytest.param("virtual", marks=pytest.mark.slow)]
)
@pairwise(loss=LOSSES, name=[*BATCHES], dtype=[torch.float64, torch.float32], way=WAYS)
def test_wrong_loss_is_never_silent(loss, name, dtype, way, layout):
    inputs, targets = batch(name, dtype)
    module = network(dtype)
    plain = copy.deepcopy(module)
    loss(plain(inputs), targets).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            way(module, inputs, targets, loss, LAYOUTS[layout])
        except ValueError:  # and nothing has changed
            assert all(parameter.grad is None for parameter in module.parameters())
            return
    told = [str(warning.message) for warning in caught]
    if any("could not check" in text for text in told):
        return
    assert error_of(module, plain) <= LARGEST_ERROR, f"wrong and silent: {told}"


def mean_over_rows(loss):
    """A loop that takes every loss for a mean over rows."""

    def step(model, batches):
        num_rows = sum(len(inputs) for inputs, _ in batches)
        for inputs, targets in batches:
            (loss(model(inputs), targets) * len(inputs) / num_rows).backward()

    return step


@pytest.mark.filterwarnings("ignore:var..")
@pairwise(loss=LOSSES, name=[*BATCHES][:-1], dtype=[torch.float64, torch.float32])
def test_splitcheck_passes_no_wrong_loss(loss, name, dtype):
    report = splitcheck(mean_over_rows(loss), network(dtype), batch(name, dtype))
    assert not report.passed


# --- the same losses, with what makes them right ---


def number_of_terms(inputs, targets):
    return is_term(targets).sum()


@pairwise(
    loss=[ratio, selected, ratio_and_an_infinity],
    name=[*BATCHES],
    dtype=[torch.float64, torch.float32],
)
def test_whole_batch_is_right(loss, name, dtype):
    inputs, targets = batch(name, dtype)
    module = network(dtype)
    plain = copy.deepcopy(module)
    loss(plain(inputs), targets).backward()
    with (
        ScatterOnceParallel(module, 2, LAYOUTS["shared"]) as engine,
        warnings.catch_warnings(action="error"),
    ):
        engine.forward_backward(inputs, targets, loss, whole_batch=True)
    assert error_of(module, plain) <= LARGEST_ERROR


@pairwise(loss=[ratio, selected], name=[*BATCHES], dtype=[torch.float64, torch.float32])
def test_number_of_terms_is_right(loss, name, dtype):
    inputs, targets = batch(name, dtype)
    module = network(dtype)
    plain = copy.deepcopy(module)
    loss(plain(inputs), targets).backward()
    with (
        ScatterOnceParallel(module, 2, LAYOUTS["shared"]) as engine,
        warnings.catch_warnings(action="error"),
    ):
        engine.forward_backward(inputs, targets, loss, count=number_of_terms)
    assert error_of(module, plain) <= LARGEST_ERROR
