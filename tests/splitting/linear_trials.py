"""Trials of a model whose gradient is the sum of the rows.

Six rows are cut in two parts, of rows 0 to 3 and of rows 4 and 5::

    row         0           1           2           3           4           5
    gradient    6 0 0 0     0 5 0 0     0 0 4 0     0 0 0 3     2 0 0 0     0 1 0 0
"""

from __future__ import annotations

import torch
from harness.oracle import seeded
from torch import nn

from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.split_results import split_results
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


def results_of(step, model=None, batch=ROWS, parts=2, loss=None):
    model = linear() if model is None else model
    options = {"parts": parts, "ranks": 1, "equal": None, "loss": loss}
    trial = Trial(SplitArguments(step, model, batch, timeout=60.0, **options))
    return split_results(trial, trial.compare())
