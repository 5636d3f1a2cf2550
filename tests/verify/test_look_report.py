"""What a look says of its calls: seen by the last of its runs, each name once."""

from __future__ import annotations

import pytest
import torch
from harness.looks import INPUTS, VALUES
from harness.models import CLASSES, FEATURES, mlp
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.step.turns import Scope
from scatterpar.verify import verifier
from scatterpar.verify.look_report import CallEffects, LookReport
from scatterpar.verify.verdicts import RIGHT, Action


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
    assert first.verdict is RIGHT
    assert first.effects.moved == ["the buffer 'calls'", "the attribute 'began'"]
    assert second.effects.moved == ["the buffer 'calls'"]  # begins in the first step
    assert first.effects.scope is Scope.NOTHING
    assert not first.effects.is_seeded
    assert first.difference <= first.tolerance < 1e-3
    assert [len(part) for part in second.parts] == [4] * 6  # as in the step


class Seeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, rows):
        torch.manual_seed(0)
        return F.dropout(self.linear(rows))


@pytest.mark.draws
@pytest.mark.filterwarnings("ignore:forward passes seed")
def test_first_report_tells_of_seeds(reports):
    with ScatterOnceParallel(Seeds(), 3, ["cpu"] * 2) as engine:
        for _ in range(2):
            engine.forward_backward(INPUTS, VALUES, nn.MSELoss())
    assert [report.effects.is_seeded for report in reports] == [True, False]


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
    assert report.parts


def test_report_without_results_has_no_effects():
    report = LookReport(RIGHT)
    assert report.effects == CallEffects()
    assert report.effects.moved == ()
    assert report.effects.scope is Scope.NOTHING
    assert report.difference == float("inf")
