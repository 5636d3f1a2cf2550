"""Runs of a few rows in different ways, each from the same state, computed by hand."""

from __future__ import annotations

import time

import pytest
import torch
from harness.oracle import seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.batch.batch import batch_of
from scatterpar.step.request import Request
from scatterpar.verify import look
from scatterpar.verify.causes import RIGHT
from scatterpar.verify.comparison import Result
from scatterpar.verify.rounding import Rounding
from scatterpar.verify.runs import Inconclusive, losses_of_cuts, pieces_of_parts

ROWS = torch.arange(1.0, 7).double()[:, None]


class Counter(nn.Module):
    """Twice its input, plus the number of its calls; drops half in training."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.linear.weight.data.fill_(2.0)
        self.register_buffer("calls", torch.zeros(()))
        self.last = 0

    def forward(self, rows):
        self.calls += 1
        self.last += 1
        return self.linear(rows) + self.calls


def total(output, targets):
    return output.sum()


def asked(monkeypatch, question, criterion=total, **options):
    """The answer to ``question(runs)`` in a look at a step on two devices."""
    answers = []

    def verdict_of(evidence):
        answers.append(question(evidence.runs))
        return RIGHT

    monkeypatch.setattr(look, "verdict_of", verdict_of)
    module = Counter()
    with ScatterOnceParallel(module, 1, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(ROWS, None, criterion, **options)
    (answer,) = answers
    return answer


pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_run_begins_and_ends_at_step_state(monkeypatch):
    """Rows 1 and 2 at once: 2 * (1 + 2) + 2 * 1; the call counts one, each time."""

    def question(runs):
        tasks = runs.own_task, runs.replica_task, runs.replica_task
        return [runs.at_once([0, 1], task) for task in tasks]

    for result in asked(monkeypatch, question):
        assert result.loss == 8
        assert [gradient.item() for gradient in result.gradients] == [3]


def test_parts_continue_unless_restarted(monkeypatch):
    """The second part is the second call: 2 * 2 + 2. From the same state: 2 * 2 + 1."""

    def question(runs):
        parts, task = [[0], [1]], runs.replica_task
        moved = runs.run(parts, task)
        return moved, runs.run(parts, task, between=runs.restart)

    moved, same = asked(monkeypatch, question)
    assert [result.loss for result in moved.results] == [3, 6]
    assert [result.loss for result in same.results] == [3, 5]
    states = [state["the buffer 'calls'"].item() for state in moved.states]
    assert states == [1, 2]


def test_weight_multiplies_zero_skips(monkeypatch):
    def question(runs):
        return runs.run([[0], [1]], runs.replica_task, [0.5, 0.0]).total

    total = asked(monkeypatch, question)
    assert (total.loss, total.result.gradients[0].item()) == (1.5, 0.5)
    assert total.num_with_gradient == 1


def test_nudge_is_rounding_that_grows(monkeypatch):
    def question(runs):
        results = [runs.run([[5]], runs.replica_task, nudge=n).results for n in (0, 15)]
        return [abs(result.loss - 13) for (result,) in results]

    first, last = asked(monkeypatch, question)
    assert 0 <= first < last < 1e-12


def test_outputs_without_graph_same_state(monkeypatch):
    first, second = asked(monkeypatch, lambda runs: runs.outputs([[0], [2]]))
    assert (first.item(), second.item()) == (3, 7)
    assert first.grad_fn is second.grad_fn is None
    assert first.requires_grad  # a criterion may ask for a gradient of it


def test_attributes_moved_by_calls_named(monkeypatch):
    names = asked(monkeypatch, lambda runs: runs.attributes_that_calls_move([0]))
    assert names == ["the attribute 'last'"]


def test_nothing_runs_after_deadline(monkeypatch):
    def question(runs):
        runs._deadline = time.monotonic() - 1
        with pytest.raises(Inconclusive, match="it takes too long"):
            runs.at_once([0], runs.replica_task)

    asked(monkeypatch, question)


def test_look_leaves_module_and_replicas(monkeypatch):
    """A step on two devices is one call of each; the look's calls do not count."""
    modules = []

    def question(runs):
        modules.append(runs.own_task.module)
        runs.run([[0], [1], [2]], runs.own_task)

    asked(monkeypatch, question)
    assert modules[0].calls == 1


# --- without a step ---


def request(inputs, targets, criterion=total):
    return Request([batch_of(inputs, targets, len(ROWS), 0)], 0, criterion)


def test_pieces_are_copies_of_rows():
    (inputs, targets), (last, _) = pieces_of_parts(request(ROWS, -ROWS), [[0, 2], [5]])
    assert inputs.flatten().tolist() == [1, 3]
    assert targets.flatten().tolist() == [-1, -3]
    inputs.zero_()
    assert last.item() == ROWS[5].item() == 6


def test_losses_of_cuts_differentiate_output():
    """Of two rows and of one: their sum of squares, and twice the rows."""
    output = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def squares(rows, scale):
        return scale * rows.square().sum()

    first, second = losses_of_cuts(
        output,
        [1.0, 10.0],
        [[0, 1], [2]],
        request(ROWS, None),
        squares,
        Rounding(torch.device("cpu")),
    )
    assert isinstance(first, Result)
    assert (first.loss, second.loss) == (5, 90)
    assert first.gradients[0].tolist() == [2, 4, 0]
    assert second.gradients[0].tolist() == [0, 0, 60]
