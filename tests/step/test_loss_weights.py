"""Losses that average over something else than rows, beside plain torch."""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core


@pytest.mark.contract
def test_micro_batches_without_terms_still_run_forward(devices):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    targets = torch.full((12,), -100)
    targets[0] = 1
    with ScatterOnceParallel(model, 3, devices(1)) as engine:
        engine.forward_backward(randn(12, FEATURES), targets, nn.CrossEntropyLoss())
    assert model[0].num_batches_tracked == 3
