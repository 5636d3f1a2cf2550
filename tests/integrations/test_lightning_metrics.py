"""Metrics of torchmetrics: empty copies, and states that are merged in row order."""

from __future__ import annotations

import pytest
import torch
from harness.optional import needed
from torch import nn

needed("lightning.pytorch", "'.[lightning]'")

import torchmetrics  # noqa: E402

from scatterpar.integrations.lightning_metrics import (  # noqa: E402
    emptied,
    is_mergeable,
    merge,
    metrics_of,
    placed,
    single_metrics,
    updated,
)

pytestmark = [pytest.mark.loops, pytest.mark.draws]
HOME = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.same = self.mean
        self.group = torchmetrics.MetricCollection(
            {"cat": torchmetrics.CatMetric(), "sum": torchmetrics.SumMetric()}
        )
        self.layer = nn.Linear(1, 1)


def test_outermost_metrics_are_found_by_all_paths():
    metrics = metrics_of(Net())
    assert set(metrics) == {"mean", "same", "group"}
    assert {place.path for place in single_metrics(metrics)} == {
        *("mean", "same", "group.cat", "group.sum"),
    }


def test_metrics_are_placed_and_put_back():
    net = Net()
    before = metrics_of(net)
    with placed(net, dict.fromkeys(before, nn.Identity())):
        assert not metrics_of(net)
    assert metrics_of(net) == before


def test_calls_update_copies_that_are_merged_in_order():
    metric = torchmetrics.CatMetric()
    metric.update(torch.tensor([0.0]))
    copies = []
    for value in (1.0, 2.0):
        copied = emptied(metric)
        assert copied.value == []
        copied.update(torch.tensor([value]))
        copies.append(copied)
    merge(metric, copies, HOME)
    assert metric.compute().tolist() == [0, 1, 2]


def test_metrics_that_no_call_has_updated_are_left_out():
    metrics = metrics_of(Net())
    metrics["mean"].update(3.0)
    assert {place.path for place in updated(metrics)} == {"mean", "same"}


class Last(torchmetrics.Metric):
    """Its state is the last value, which has no order among calls."""

    def __init__(self):
        super().__init__()
        self.add_state("last", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value):
        self.last = value

    def compute(self):
        return self.last


class Mean(torchmetrics.MeanMetric):
    """Says that an update reads the state."""

    full_state_update = True


def test_mergeable_metrics():
    sums = torchmetrics.SumMetric()
    assert is_mergeable(sums)
    assert is_mergeable(torchmetrics.MetricCollection([sums, torchmetrics.CatMetric()]))
    assert not is_mergeable(Last())
    assert not is_mergeable(torchmetrics.MetricCollection([sums, Mean()]))
