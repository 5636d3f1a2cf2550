"""What a hypothesis is tested on, for a model whose gradient is the sum of the rows.

Six rows are cut in two parts, of rows 0 to 3 and of rows 4 and 5::

    row         0           1           2           3           4           5
    gradient    6 0 0 0     0 5 0 0     0 0 4 0     0 0 0 3     2 0 0 0     0 1 0 0
"""

from __future__ import annotations

import pytest
import torch
from harness.oracle import seeded
from torch import nn

from scatterpar.causes.evidence import CauseKind
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.split_gradients import GradientEvidence
from scatterpar.splitting.trial import Trial

ROWS = torch.eye(4).repeat(2, 1)[:6] * torch.tensor([6.0, 5, 4, 3, 2, 1])[:, None]
SUM = [8, 6, 4, 3]
OF_PARTS = [[6, 5, 4, 3], [2, 1, 0, 0]]


def linear(features=4):
    with seeded():
        return nn.Linear(features, 1, bias=False)


def mean_of_means(model, batches):
    for batch in batches:
        (model(batch).mean() / len(batches)).backward()


def sum_of_sums(model, batches):
    for batch in batches:
        model(batch).sum().backward()


def evidence_of(step, model=None, batch=ROWS, parts=2, loss=None):
    model = linear() if model is None else model
    options = {"parts": parts, "ranks": 1, "equal": None, "loss": loss}
    trial = Trial(SplitArguments(step, model, batch, timeout=60.0, **options))
    return GradientEvidence(trial, trial.compare())


def test_part_has_gradient_of_its_rows():
    evidence = evidence_of(sum_of_sums)
    assert evidence.parts == [[0, 1, 2, 3], [4, 5]]
    assert evidence.expected["weight"].tolist() == [SUM]
    of_parts = [gradients["weight"].tolist() for gradients in evidence.of_parts]
    assert of_parts == [[row] for row in OF_PARTS]
    assert evidence.wrong == []


def test_mean_of_means_weighs_parts_alike():
    evidence = evidence_of(mean_of_means)
    of_loop, of_batch = evidence.weights(["weight"])
    torch.testing.assert_close(of_loop, torch.tensor([0.5, 0.5]).double())
    torch.testing.assert_close(of_batch, torch.tensor([4 / 6, 2 / 6]).double())
    assert evidence.counted_as(of_batch).words == "rows"
    assert evidence.counted_as(of_loop) is None
    assert evidence.wrong == evidence.names == ["weight"]
    assert evidence.is_everything(evidence.wrong)  # there is no other parameter


def test_factor_of_all_named_parameters():
    def thrice(model, batches):
        for batch in batches:
            (len(batches) * model(batch).sum()).backward()

    evidence = evidence_of(thrice, parts=3)
    finding = evidence.constant_factor(["weight"])
    assert finding.kind is CauseKind.CONSTANT_FACTOR
    assert finding.factor == pytest.approx(3)
    assert evidence_of(mean_of_means).constant_factor(["weight"]) is None
    # A right gradient is one times itself.
    assert evidence_of(sum_of_sums).constant_factor(["weight"]) is None


def test_factor_of_zero_has_a_kind_of_its_own():
    def detached(model, batches):
        outputs = [model(batch).sum() for batch in batches]
        loss = sum(outputs) if len(batches) == 1 else 0 * sum(outputs)
        loss.backward()

    evidence = evidence_of(detached)
    assert evidence.constant_factor(["weight"]).kind is CauseKind.NO_GRADIENT


def test_gradient_of_two_numbers_has_no_factor():
    evidence = evidence_of(sum_of_sums, linear(2), torch.ones(6, 2))
    evidence.tolerance = 1e-12
    evidence.actual = {"weight": 3 * evidence.expected["weight"]}
    assert evidence.constant_factor(["weight"]) is None


def test_one_part_compared_with_a_loss():
    def half(model, batches):
        for batch in batches:
            (model(batch).sum() / 2).backward()

    evidence = evidence_of(half, loss=lambda model, batch: model(batch).sum())
    assert evidence.is_wrong_with_one_part()
    right = evidence_of(sum_of_sums, loss=lambda model, batch: model(batch).sum())
    assert not right.is_wrong_with_one_part()


def test_part_that_is_nan_counts_as_nothing():
    """A mean over the numbers above 2.5, of which the second part has none."""

    def step(model, batches):
        for batch in batches:
            large = batch.amax(1) > 2.5
            ((model(batch)[:, 0] * large).sum() / large.sum()).backward()

    evidence = evidence_of(step)
    first, second = (gradients["weight"][0].tolist() for gradients in evidence.of_parts)
    assert first == [6 / 4, 5 / 4, 1, 3 / 4]
    assert second == [0, 0, 0, 0]
    assert evidence.is_undefined


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
    assert evidence_of(sum_of_sums, model()).depends_on_earlier_parts() == matters


def test_penalty_per_part_doubles_at_3_parts():
    def step(model, batches):
        for batch in batches:
            (model(batch).sum() + model.weight.sum()).backward()

    (growth,) = evidence_of(step).growths()
    assert growth.factor == pytest.approx(2)
    assert growth.expected == 2
    assert growth.cosine == pytest.approx(1)


def test_no_growth_without_difference_or_rows():
    assert evidence_of(sum_of_sums).once_per_part() is None
    assert evidence_of(mean_of_means, batch=ROWS[:5]).growths() == []


def test_wrong_parameters_are_named():
    model = nn.ModuleDict({"right": linear(), "wrong": linear()})

    def step(model, batches):
        for batch in batches:
            model["right"](batch).sum().backward()
            (len(batches) * model["wrong"](batch).sum()).backward()

    evidence = evidence_of(step, model)
    assert evidence.wrong == ["wrong.weight"]
    assert not evidence.is_everything(evidence.wrong)
    finding = evidence.factor_or_weights()
    assert finding.names == ["wrong.weight"]
    assert finding.factor == pytest.approx(2)
    assert evidence.is_everything(["wrong.weight", "right.weight"])
