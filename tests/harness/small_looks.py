"""A look at a small step, in which questions are asked of its runs."""

from __future__ import annotations

import torch
from torch import nn

from harness.oracle import seeded
from scatterpar import ScatterOnceParallel
from scatterpar.verify import look
from scatterpar.verify.verdicts import RIGHT

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
    first, *_ = answers  # then those of the step's own parts
    return first
