"""What a cause may ask, in a look at a step whose results can be computed by hand.

One weight, which is 2, and six rows: 1, 2, 3, 4, 5, 6. The loss is 2 times their sum.
"""

from __future__ import annotations

import types

import pytest
import torch
from harness.oracle import seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.batch import batch_of
from scatterpar.causes.evidence import CauseKind
from scatterpar.step.request import Request
from scatterpar.verify import look, look_rounding
from scatterpar.verify.look_causes import (
    do_losses_combine,
    do_rows_meet,
    is_rounding,
    shapes_of,
    uses_number,
)
from scatterpar.verify.look_results import LookResults, name_of_loss
from scatterpar.verify.results import Result
from scatterpar.verify.verdicts import RIGHT

ROWS = torch.arange(1.0, 7).double()[:, None]


def doubled():
    with seeded():
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(2.0)
    return model


def total(output, targets):
    return output.sum()


def asked(monkeypatch, question, criterion=total, model=None, targets=None, **options):
    """The answer to ``question(results)`` in a look, which takes the sum for a mean."""
    answers = []

    def verdict_of(results):
        answers.append(question(results))
        return RIGHT

    monkeypatch.setattr(look, "verdict_of", verdict_of)
    model = doubled() if model is None else model
    with ScatterOnceParallel(model, 1, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(ROWS, targets, criterion, **options)
    first, *_ = answers  # then those of the step's own parts
    return first


def sum_of(rows):
    return float(sum(ROWS[row].item() for row in rows))


def test_results_of_rows_and_parts(monkeypatch):
    results = asked(monkeypatch, lambda results: results)
    assert results.expected.loss == 2 * sum_of(results.rows)
    assert results.expected.gradients[0].item() == sum_of(results.rows)
    sizes = [len(part) for part in results.parts]
    assert list(results.step_weights) == [size / results.num_rows for size in sizes]
    sums = [sum_of(part) * len(part) for part in results.parts]
    assert results.actual.loss == pytest.approx(2 * sum(sums) / results.num_rows)


def test_parts_start_from_same_state(monkeypatch):
    def question(results):
        return (
            results.parts,
            [result.loss for result in results.results_of_parts],
            results.weights().right.tolist(),
        )

    parts, losses, weights = asked(monkeypatch, question)
    assert losses == [2 * sum_of(part) for part in parts]
    assert weights == [1.0] * len(parts)


def test_limit_is_asked_for_without_an_order(monkeypatch):
    """It was the tolerance until somebody had asked whether it is rounding."""

    def question(results):
        before = results.limit
        assert not is_rounding(results)
        return before, results.limit, results.tolerance

    before, after, tolerance = asked(monkeypatch, question)
    assert before == after >= tolerance


def test_outputs_of_rows_then_of_parts(monkeypatch):
    def question(results):
        return (
            results.rows,
            results.outputs,
            shapes_of(results),
            do_rows_meet(results),
        )

    rows, outputs, shapes, meeting = asked(monkeypatch, question, targets=ROWS)
    assert torch.equal(outputs[0], 2 * ROWS[rows])
    assert torch.equal(torch.cat(outputs[1:]), 2 * ROWS[rows])
    assert shapes == [(len(rows), 1)] * 2
    assert meeting is None


class Centred(nn.Module):
    """Takes the mean of the rows away: rows mix in the module, not in the loss."""

    def __init__(self):
        super().__init__()
        self.linear = doubled()

    def forward(self, rows):
        return self.linear(rows - rows.mean())


def mean_of_squares(output, targets):
    return output.square().mean()


@pytest.mark.parametrize(
    ("model", "criterion", "combine"),
    [(doubled, total, False), (Centred, mean_of_squares, True)],
)
def test_losses_of_one_output_combine(monkeypatch, model, criterion, combine):
    answer = asked(monkeypatch, do_losses_combine, criterion, model())
    assert answer == combine


def test_loss_of_all_rows_combines_from_nothing(monkeypatch):
    """With ``whole_batch`` there is one loss, and no sum of others, if it were one."""

    def criterion(output, targets):
        return output.square().mean() + len(calls)

    calls = []
    model = Centred()
    model.register_forward_hook(lambda *_: calls.append(1))
    options = {"model": model, "whole_batch": True}
    assert not asked(monkeypatch, do_losses_combine, criterion, **options)


def test_rows_that_meet_differ_by_the_mean(monkeypatch):
    """Of two parts, each has the mean of its own rows taken away."""

    def question(results):
        return results.rows, results.parts, do_rows_meet(results)

    rows, parts, meeting = asked(monkeypatch, question, mean_of_squares, Centred())
    mean = ROWS[rows].mean()
    whole = 2 * (ROWS[rows] - mean)
    errors = [2 * float((ROWS[part].mean() - mean).abs()) for part in parts]
    assert meeting.kind is CauseKind.ROWS_ARE_COMPARED
    assert meeting.difference == pytest.approx(max(errors) / float(whole.abs().max()))


class Numbered(nn.Module):
    """Returns a number, which differs between parts if it is of the rows."""

    def __init__(self, of_rows):
        super().__init__()
        self.linear = doubled()
        self.of_rows = of_rows

    def forward(self, rows):
        of = rows if self.of_rows else torch.ones_like(rows)
        return self.linear(rows), (self.linear.weight * of).mean()


@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("is_used", [1.0, 0.0])
def test_number_of_a_part_that_the_loss_uses(monkeypatch, of_rows, is_used):
    def criterion(output, targets):
        rows, number = output
        return rows.sum() + is_used * number

    answer = asked(monkeypatch, uses_number, criterion, Numbered(of_rows))
    assert answer == (of_rows and bool(is_used))


def test_nudges_explain_no_wrong_sum(monkeypatch):
    answer = asked(monkeypatch, look_rounding._difference_by_nudges)
    assert 0 <= answer < 1e-12


def named(name):
    function = types.FunctionType(total.__code__, {}, name)
    function.__qualname__ = name
    return function


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        (None, "the module's own loss"),
        (total, "the criterion total"),
        (named("criterion"), "the criterion"),
        (nn.MSELoss(), "the criterion MSELoss"),
    ],
)
def test_criterion_named_as_in_texts(criterion, name):
    assert name_of_loss(request(criterion)) == name


def test_loss_named_as_its_loop_says():
    assert name_of_loss(request(loss_name="compute_loss")) == "compute_loss"


LABELS = torch.tensor([0, -100, 1, -100, 1])


def request(criterion=None, **options):
    return Request([batch_of(LABELS, LABELS, 5, 0)], 0, criterion, **options)


class ByHand(LookResults):
    """Without runs."""

    def __init__(self, *results):
        super().__init__(
            *results,
            tolerance=0.0,
            ignored=(),
            runs=None,
            draws_steadily=True,
            moved=(),
        )


def test_difference_of_both_results():
    expected, actual = (Result(1.0, [torch.tensor([size])]) for size in (4.0, 2.0))
    losses = ByHand(request(), [[0], [1]], [1, 1], expected, actual)
    assert losses.difference == 0.5
    assert losses.num_rows == 2
