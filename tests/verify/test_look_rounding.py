"""What rounding explains in a look: who says yes, and what each may not decide."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from harness.looks import step
from harness.models import FEATURES
from harness.oracle import randn, seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.batch import batch_of
from scatterpar.step.request import Request
from scatterpar.verify import look, look_rounding
from scatterpar.verify.look_rounding import ComparedResults
from scatterpar.verify.results import Result
from scatterpar.verify.verdicts import Action

ROUNDING = 1e-4
TOLERANCE = 1e-6
# Three rows with gradients that cancel.
CANCELLING = {0: 2 / 3, 1: -1 / 3, 2: -1 / 3}


def result(gradient, loss=0.0):
    return Result(loss, [torch.tensor([gradient], dtype=torch.float64)])


class RunsByHand:
    """Rows with these gradients; those of several rows are their mean."""

    rounding = SimpleNamespace(limit=ROUNDING)

    def __init__(self, gradients, at_once=None):
        self.gradients = gradients
        self.whole = at_once

    def at_once(self, rows):
        if len(rows) > 1 and self.whole is not None:
            return result(self.whole)
        gradients = [self.gradients[row] for row in rows]
        return result(sum(gradients) / len(gradients))


def compared(gradients, actual, expected=0.0, at_once=None, **options):
    """Results whose rows alone have these ``gradients``."""
    rows = torch.zeros(len(gradients), 1)
    request = Request([batch_of(rows, None, len(gradients), 0)], 0, None, **options)
    return ComparedResults(
        request,
        [[*gradients]],
        [1.0],
        result(expected),
        result(actual),
        TOLERANCE,
        RunsByHand(gradients, at_once),
    )


def do_rows_cancel(*args, **options):
    return look_rounding._do_rows_cancel(compared(*args, **options))


def test_sum_of_zero_differs_by_its_rows():
    assert do_rows_cancel(CANCELLING, 1e-6, at_once=-1e-17)
    assert not do_rows_cancel(CANCELLING, 1e-2, at_once=-1e-17)


def test_loss_of_zero_differs_by_its_rows():
    losses = [result(1.0, loss=size) for size in (1.0, -1.0)]
    at_once = result(2.0, loss=1e-17)
    for loss, answer in ((1e-4, True), (1e-2, False)):
        in_parts = result(2.0, loss=loss)
        rounded = look_rounding._is_rounding_of(
            losses, in_parts, at_once, ROUNDING, TOLERANCE
        )
        assert rounded == answer


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_row_that_is_not_finite_is_no_evidence(value):
    """A ratio of sums was "rounding", 38 % off, if one row had no term."""
    assert not do_rows_cancel(CANCELLING | {1: value}, 1e-6, at_once=-1e-17)
    assert not do_rows_cancel(CANCELLING, value, at_once=-1e-17)
    assert not do_rows_cancel(CANCELLING, 1e-6, expected=value, at_once=-1e-17)


def test_row_without_a_term_is_not_asked():
    """By itself it is NaN. In the step it adds nothing."""

    def count(inputs, targets):
        return (inputs == 0).sum()

    rows = torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    request = Request([batch_of(rows, None, 4, 0)], 0, None, count=count)
    gradients = CANCELLING | {3: math.nan}
    results = ComparedResults(
        request,
        [[*gradients]],
        [1.0],
        result(0.0),
        result(1e-6),
        TOLERANCE,
        RunsByHand(gradients, at_once=-1e-17),
    )
    assert look_rounding._do_rows_cancel(results)


def test_rows_that_do_not_add_up_say_nothing():
    """Of a ratio, a row is as large as its own divisor is small."""
    gradients = {0: 1e6, 1: 1.0, 2: 1.0}
    assert not do_rows_cancel(gradients, 1.3, expected=1.0, at_once=1.0)


def test_nothing_is_no_evidence():
    request = Request([batch_of(torch.zeros(2, 1), None, 2, 0)], 0, None)
    nothing = look_rounding._is_rounding_of([], result(0.0), result(0.0), 1.0, 1.0)
    assert not nothing
    no_terms = Request([request.batches[0]], 0, None, count=lambda *_: 0)
    results = ComparedResults(
        no_terms, [[0, 1]], [1.0], result(0.0), result(0.0), 1.0, RunsByHand({0: 1.0})
    )
    assert not look_rounding._do_rows_cancel(results)


def test_sum_is_larger_than_its_sample():
    """One of four rows is asked: the sum of all is rounded by four times their size."""
    gradients = {row: (-1.0) ** (row // 4) for row in range(64)}
    sample = {"at_once": 0.0, "reduction": "sum"}
    largest = ROUNDING * len(gradients)
    assert do_rows_cancel(gradients, 0.9 * largest, **sample)
    assert not do_rows_cancel(gradients, 1.1 * largest, **sample)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_limit_explains_what_is_not_finite(value):
    results = compared(CANCELLING, value)
    assert results.limit == TOLERANCE
    assert not results.is_within_tolerance
    assert not results.is_expected(result(value))
    assert not results.is_expected(result(1.0, loss=value))


def nearly_centred(output, targets):
    """A ratio of sums, beside a mean of rows that are 30,000 times as large, and cancel."""
    signs, values, weights = targets.split(1, 1)
    large = 3e4 * (signs * output).mean()
    return large + (weights * values * output).sum() / weights.sum()


def test_float64_confirms_what_rows_alone_explain(monkeypatch):
    """In float32 the difference is as small as rounding of the large terms is."""
    verdicts = []
    report_for = look.ReplicaLook.report_for

    def recorded(self, parts):
        report = report_for(self, parts)
        verdicts.append(report.verdict)
        return report

    monkeypatch.setattr(look.ReplicaLook, "report_for", recorded)
    with seeded(0):
        model = nn.Linear(FEATURES, 1)
    inputs = randn(1, FEATURES).float().expand(8, FEATURES).contiguous()
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    targets = torch.stack([signs, torch.arange(8.0), 1 + torch.arange(8.0)], 1)
    refusal = pytest.raises(ValueError, match="would be off by")
    with ScatterOnceParallel(model, 2, ["cpu"]) as engine, refusal:
        step(engine, nearly_centred, targets, inputs)
    # Each of the chosen rows, then of the step's own parts.
    first, _, in_double, _ = verdicts
    assert first.rests_on_rows
    assert in_double.action is Action.REFUSE


def soft_labels(output, targets):
    return -(targets * output.log_softmax(-1)).sum()


# A student that starts as its teacher: its gradient is nothing but rounding.
LOSSES_OF_STUDENTS = {
    "a mean": (lambda o, t: soft_labels(o, t) / len(o), True),
    "a mean, and 1": (lambda o, t: 1 + soft_labels(o, t) / len(o), True),
    "a sum": (soft_labels, False),
    "a mean, and rows": (lambda o, t: soft_labels(o, t) / len(o) + len(o), False),
    "NaN": (lambda o, t: soft_labels(o, t) * math.nan, True),  # no answer
    "infinity": (lambda o, t: soft_labels(o, t) + math.inf, True),
    "nothing": (lambda o, t: 0.0 * soft_labels(o, t), True),
}


@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])
@pytest.mark.parametrize("name", LOSSES_OF_STUDENTS)
def test_loss_beside_rounded_gradient_is_compared(name, layout):
    loss, is_right = LOSSES_OF_STUDENTS[name]
    with seeded(3):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
        rows = randn(12, 6)
    teacher = model(rows).softmax(-1).detach()
    with ScatterOnceParallel(model, device_ids=layout) as engine:
        if not is_right:
            with pytest.raises(ValueError, match="is not the mean"):
                step(engine, loss, teacher, rows)
            return
        for _ in range(2):
            found = step(engine, loss, teacher, rows)
    expected = loss(model(rows), teacher).detach()
    torch.testing.assert_close(found, expected, equal_nan=True)
