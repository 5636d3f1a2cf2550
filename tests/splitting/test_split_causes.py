"""What each question answers for a model whose gradient is the sum of the rows.

In loops the causes and their words are in ``test_cause_words.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from splitting.linear_trials import ROWS, linear, mean_of_means, results_of, sum_of_sums
from torch import nn

from scatterpar.causes.evidence import CauseKind
from scatterpar.splitting import split_causes


def test_factor_of_all_named_parameters():
    def thrice(model, batches):
        for batch in batches:
            (len(batches) * model(batch).sum()).backward()

    results = results_of(thrice, parts=3)
    finding = split_causes.constant_factor(results, ["weight"])
    assert finding.kind is CauseKind.CONSTANT_FACTOR
    assert finding.factor == pytest.approx(3)
    assert split_causes.constant_factor(results_of(mean_of_means), ["weight"]) is None
    # A right gradient is one times itself.
    assert split_causes.constant_factor(results_of(sum_of_sums), ["weight"]) is None


def test_factor_of_zero_has_a_kind_of_its_own():
    def detached(model, batches):
        outputs = [model(batch).sum() for batch in batches]
        loss = sum(outputs) if len(batches) == 1 else 0 * sum(outputs)
        loss.backward()

    results = results_of(detached)
    assert (
        split_causes.constant_factor(results, ["weight"]).kind is CauseKind.NO_GRADIENT
    )


def test_gradient_of_two_numbers_has_no_factor():
    results = results_of(sum_of_sums, linear(2), torch.ones(6, 2))
    actual = {"weight": 3 * results.expected["weight"]}
    results = replace(results, tolerance=1e-12, actual=actual)
    assert split_causes.constant_factor(results, ["weight"]) is None


def test_one_part_compared_with_a_loss():
    def half(model, batches):
        for batch in batches:
            (model(batch).sum() / 2).backward()

    results = results_of(half, loss=lambda model, batch: model(batch).sum())
    assert split_causes.is_wrong_with_one_part(results)
    right = results_of(sum_of_sums, loss=lambda model, batch: model(batch).sum())
    assert not split_causes.is_wrong_with_one_part(right)


class Counter(nn.Module):
    """Multiplies by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows):
        self.calls += 1
        return self.calls * self.linear(rows)


@pytest.mark.parametrize(("model", "matters"), [(linear, False), (Counter, True)])
def test_order_matters_if_calls_are_counted(model, matters):
    assert (
        split_causes.depends_on_earlier_parts(results_of(sum_of_sums, model()))
        == matters
    )


def test_penalty_per_part_doubles_at_3_parts():
    def step(model, batches):
        for batch in batches:
            (model(batch).sum() + model.weight.sum()).backward()

    (growth,) = split_causes.growths(results_of(step))
    assert growth.factor == pytest.approx(2)
    assert growth.expected == 2
    assert growth.cosine == pytest.approx(1)


def test_no_growth_without_difference_or_rows():
    assert split_causes.once_per_part(results_of(sum_of_sums)) is None
    assert split_causes.growths(results_of(mean_of_means, batch=ROWS[:5])) == []


def test_wrong_parameters_are_named():
    model = nn.ModuleDict({"right": linear(), "wrong": linear()})

    def step(model, batches):
        for batch in batches:
            model["right"](batch).sum().backward()
            (len(batches) * model["wrong"](batch).sum()).backward()

    results = results_of(step, model)
    assert results.wrong == ["wrong.weight"]
    assert not results.is_everything(results.wrong)
    finding = split_causes.factor_or_weights(results)
    assert finding.names == ["wrong.weight"]
    assert finding.factor == pytest.approx(2)
    assert results.is_everything(["wrong.weight", "right.weight"])
