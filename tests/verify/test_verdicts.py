"""How losses of parts combine, with results computed by hand.

The order of all causes, in steps of an engine, is ``guide/test_outcomes.py``.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from harness.looks import INPUTS, VALUES
from harness.models import CLASSES, FEATURES, mlp
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.batch import batch_of
from scatterpar.causes.counts import IGNORED, Count
from scatterpar.causes.evidence import CauseKind
from scatterpar.step.request import Request
from scatterpar.step.turns import Scope
from scatterpar.verify import verdicts, verifier
from scatterpar.verify.look_causes import do_shapes_broadcast, has_other_weights
from scatterpar.verify.look_results import LookResults
from scatterpar.verify.results import Result, weighted_sum
from scatterpar.verify.verdicts import (
    RIGHT,
    Action,
    CallEffects,
    LookReport,
    Verdict,
)

# Two parts: rows 0 to 2, of which one has a label, and row 3, which has one.
LABELS = torch.tensor([1, -100, -100, 2])
PARTS = [[0, 1, 2], [3]]
RESULTS = [
    Result(4.0, [torch.tensor([1.0, 0.0])]),
    Result(8.0, [torch.tensor([0.0, 1.0])]),
]


class ByHand(LookResults):
    """The result of all rows is that of the parts with these weights."""

    results_of_parts = RESULTS
    loss_of_output = RESULTS[0]
    limit = 1e-6

    def __init__(self, true_weights, weights=(0.25, 0.75), shapes=(), **request):
        """``shapes`` are those of output and targets, if these are tensors."""
        request = Request([batch_of(LABELS, LABELS, 4, 0)], 0, nn.MSELoss(), **request)
        expected = weighted_sum(RESULTS, true_weights)
        actual = weighted_sum(RESULTS, weights)
        super().__init__(
            request,
            PARTS,
            weights,
            expected,
            actual,
            tolerance=self.limit,
            ignored=IGNORED,
            runs=SimpleNamespace(targets_of=lambda rows: targets),
            draws_steadily=True,
            moved=(),
        )
        output, targets = [torch.zeros(shape) for shape in shapes] or [None, None]
        vars(self)["outputs"] = [output, None, None]


@pytest.fixture
def verdict_of(monkeypatch):
    """The function of ``verdicts``, by the questions that need no runs."""
    questions = {
        CauseKind.CONSTANT_FACTOR: has_other_weights,
        CauseKind.SHAPES_BROADCAST: do_shapes_broadcast,
    }
    monkeypatch.setattr(verdicts, "QUESTIONS", questions)
    return verdicts.verdict_of


@pytest.mark.parametrize(
    ("true_weights", "remedy"),
    [
        (
            [3 / 4, 1 / 4],
            "a mean over all rows, but the engine counts labels: pass count=lambda",
        ),
        ([1, 1], 'a sum: pass reduction="sum"'),
        ([1 / 2, 1 / 2], "a mean over the labels that are not -100"),
        (
            [0.9, 0.3],
            "If the loss compares rows with each other, or is a ratio of sums",
        ),
    ],
)
def test_combination_named_by_its_weights(true_weights, remedy, verdict_of):
    verdict = verdict_of(ByHand(true_weights))
    assert verdict.action is Action.REFUSE
    assert remedy in verdict.text
    assert (
        "your loss of 4 rows is not the mean of the losses of 3 + 1 rows"
        in verdict.problem
    )
    assert "Nothing was changed" in verdict.text


def test_difference_told_in_percent(verdict_of):
    """Expected 0.75 and 0.25 of the gradients, and computed 0.25 and 0.75."""
    assert "off by 66.7 %" in verdict_of(ByHand([3 / 4, 1 / 4])).text
    nothing = ByHand([3 / 4, 1 / 4], weights=(math.nan, 1.0))
    assert "NaN or infinite" in verdict_of(nothing).text


def test_mean_told_to_leave_count_out(verdict_of):
    losses = ByHand([3 / 4, 1 / 4], count=lambda inputs, targets: 1)
    assert 'pass reduction="mean", without count=' in verdict_of(losses).text


def test_shapes_that_broadcast_told(verdict_of):
    losses = ByHand([0.9, 0.3], shapes=[(4, 1), (4,)])
    assert "broadcast to a matrix of all pairs" in verdict_of(losses).text
    losses = ByHand([0.9, 0.3], shapes=[(4, 2), (4,)])
    assert "broadcast" not in verdict_of(losses).text


def test_sum_with_rest_may_have_penalty(verdict_of):
    losses = ByHand([0.9, 0.3], reduction="sum")
    assert "such as a penalty on weights" in verdict_of(losses).text


def test_one_part_shows_no_weights(monkeypatch, verdict_of):
    """One part alone has a gradient: any weights fit, so the text names none."""
    results = [RESULTS[0], Result(8.0, [torch.zeros(2)])]
    monkeypatch.setattr(ByHand, "results_of_parts", results)
    losses = ByHand([1, 1])
    vars(losses)["expected"] = weighted_sum(results)
    assert losses.weights() is None
    assert "It seems" not in verdict_of(losses).text


@pytest.mark.parametrize(
    ("path", "ignored", "without", "expression"),
    [
        ("targets", -100, "", "scatterpar.count_labels()"),
        ('inputs["labels"]', 255, "", "scatterpar.count_labels(255)"),
        (
            'targets["y"]',
            -100,
            "first",
            "scatterpar.count_labels(shifted=True, key='y')",
        ),
        ("inputs[1]", -1, "", "lambda inputs, targets: inputs[1].ne(-1).sum()"),
        ("inputs", 0, "last", "lambda inputs, targets: inputs[:, :-1].ne(0).sum()"),
        ('inputs["size"]', None, "", 'lambda inputs, targets: inputs["size"].sum()'),
    ],
)
def test_count_is_told_as_an_expression(path, ignored, without, expression):
    count = Count("terms", path, (1.0,) * 4, ignored, without)
    assert verdicts._expression(ByHand([1, 1]), count) == expression


@pytest.mark.parametrize(
    ("reduction", "remedy"),
    [("mean", "pass count="), ("sum", 'pass reduction="mean" and count=')],
)
def test_count_is_told_with_what_it_needs(verdict_of, reduction, remedy):
    losses = ByHand([1 / 2, 1 / 2], reduction=reduction)
    assert f"labels that are not -100: {remedy}" in verdict_of(losses).text


def test_remedies_name_missing_arguments():
    def ways(remedy, **options):
        return " ".join(verdicts.other_remedies(ByHand([1, 1], **options), remedy))

    assert "Otherwise pass count= for a mean" in ways("It is a ratio.")
    assert "another count= for a mean" in ways("It is a ratio.", count=len)
    assert "count=" not in ways("pass count=len")
    assert 'or reduction="sum" for a sum' in ways("It is a ratio.")
    assert 'reduction="sum"' not in ways("It is a ratio.", reduction="sum")
    assert "whole_batch" not in ways("pass whole_batch=True")


def test_text_has_problem_remedy_notes():
    assert verdicts.in_lines("It is wrong.", "Do this.") == "It is wrong.\nDo this."
    assert verdicts.in_lines("A.", "B.", "C.", "D.") == "A.\nB.\n\nC. D."


def test_replica_error_told_beside_loss():
    error = KeyError("auxiliary")
    verdict = verdicts.error_of_replica("the criterion loss", 3, 0.25, error)
    assert verdict.error is error
    assert "the loss of 3 rows is 0.25 with your own module" in verdict.text
    assert "KeyError: 'auxiliary'" in verdict.text


class Finished(nn.Module):
    """Returns its loss: the mean over entries of ``chosen`` of the second input."""

    def __init__(self, chosen):
        super().__init__()
        self.body = nn.Linear(3, 4).double()
        self.chosen = chosen

    def forward(self, rows, marks):
        chosen = self.chosen(marks)
        losses = self.body(rows).square().sum(-1, keepdim=True) * chosen
        return losses.sum() / chosen.sum()


MARKS = torch.arange(24).view(12, 2) % 5 % 3 - 1


@pytest.mark.draws
@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (lambda marks: marks != -1, r"inputs\[1\]\.ne\(-1\)\.sum\(\)"),
        (lambda marks: marks != 0, r"inputs\[1\]\.ne\(0\)\.sum\(\)"),
        (lambda marks: marks + 1.5, "reduction=.sum. for a sum"),
    ],
)
def test_finished_loss_is_told_labels_that_count(chosen, words):
    """Labels were among the inputs, and the advice was ``whole_batch=True``."""
    inputs = torch.randn(12, 3).double(), MARKS
    engine = ScatterOnceParallel(Finished(chosen), 2, ["cpu"] * 2)
    with engine, pytest.raises(ValueError, match=words):
        engine.forward_backward(inputs)


class Centred(nn.Module):
    """Moves a centre by its rows, and takes it away from them, in training only."""

    def __init__(self, compares):
        super().__init__()
        self.body = nn.Linear(3, 4).double()
        self.compares = compares
        self.register_buffer("centre", torch.zeros(4).double())

    def forward(self, rows):
        features = self.body(rows)
        if self.training:
            mean = features.detach().mean(0)
            self.centre.mul_(0.5).add_(mean, alpha=0.5)
        features = features - self.centre
        return features.std(0).sum() if self.compares else features.square().mean()


@pytest.mark.draws
def test_centre_of_rows_is_told_by_name():
    """As batch normalisation, it was refused, for a module with its own loss."""
    inputs = torch.randn(12, 3).double()
    engine = ScatterOnceParallel(Centred(False), 2, ["cpu"] * 2)
    with engine, pytest.warns(UserWarning, match="move the buffer 'centre'"):
        engine.forward_backward(inputs)
    assert engine.module.training
    engine = ScatterOnceParallel(Centred(True), 2, ["cpu"] * 2)
    with engine, pytest.raises(ValueError, match="compares rows"):
        engine.forward_backward(inputs)
    assert engine.module.training


@pytest.fixture
def reports(monkeypatch):
    """Those of all looks."""
    seen = []
    look = verifier.look

    def recording(*args):
        seen.append(look(*args))
        return seen[-1]

    monkeypatch.setattr(verifier, "look", recording)
    return seen


class Counts(nn.Module):
    """Counts its calls in a buffer, and in an attribute that begins with them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows):
        self.calls += 1
        self.began = len(rows)
        return self.linear(rows)


@pytest.mark.draws
@pytest.mark.filterwarnings("ignore:forward passes move")
def test_report_of_a_step_that_moves_state(reports):
    with ScatterOnceParallel(Counts(), 3, ["cpu"] * 2) as engine:
        for _ in range(2):
            engine.forward_backward(INPUTS, VALUES, nn.MSELoss())
    first, second = reports
    for report in (first, second):
        assert report.verdict is RIGHT
        assert report.effects.moved == ["the buffer 'calls'", "the attribute 'began'"]
        assert report.effects.scope is Scope.NOTHING
        assert report.difference <= report.tolerance < 1e-3
        _, of_step = report.compared  # after the chosen rows
        assert [len(part) for part in of_step] == [4] * 6


def test_refused_look_has_its_difference(reports):
    """Twice the loss of half of the rows, in two parts."""

    def added(output, targets):
        return (output - targets).square().sum()

    engine = ScatterOnceParallel(mlp(), 3, ["cpu"] * 2)
    with engine, pytest.raises(ValueError, match="sum"):
        engine.forward_backward(INPUTS, VALUES, added)
    (report,) = reports
    assert report.verdict.action is Action.REFUSE
    assert report.difference > report.tolerance
    assert report.compared


def test_report_without_results_has_no_effects():
    report = LookReport(RIGHT)
    assert report.effects == CallEffects()
    assert report.effects.moved == ()
    assert report.effects.scope is Scope.NOTHING
    assert report.difference == float("inf")


def test_report_that_says_more_counts():
    refused = LookReport(Verdict(Action.REFUSE), compared=[[[0], [1]]])
    warned = LookReport(Verdict(Action.WARN), compared=[[[2], [3]]])
    loose = LookReport(RIGHT, difference=1e-3, eps=1e-7)
    close = LookReport(RIGHT, difference=1e-9, eps=1e-3)
    for first, second in [(refused, warned), (warned, loose), (loose, close)]:
        for joint in (first.beside(second), second.beside(first)):
            assert joint.verdict is first.verdict
            assert joint.difference == first.difference
            assert joint.eps == max(first.eps, second.eps)
    both = warned.beside(refused)
    assert both.compared == [[[2], [3]], [[0], [1]]]


def test_effects_of_both_reports_are_told_once():
    moves = LookReport(RIGHT, CallEffects(["a", "b"], [(2,)], Scope.FUNCTION))
    other = LookReport(RIGHT, CallEffects(["b", "c"], [(2,)], Scope.NOTHING))
    effects = moves.beside(other).effects
    assert effects == CallEffects(["a", "b", "c"], [(2,)], Scope.FUNCTION)
