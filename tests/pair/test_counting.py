"""How the replicas' losses become the whole batch's: what ancestors got wrong, and its edges."""

from __future__ import annotations

import pytest
import torch
from harness.models import FEATURES, mlp
from harness.oracle import randn
from torch import nn

from pair.common import Pair
from scatterpar import DataParallelCriterion

pytestmark = pytest.mark.core


def test_a_batch_that_is_all_ignored_is_no_nan(devices):
    model = mlp()
    pair = Pair(model, nn.CrossEntropyLoss(), devices(4))
    inputs = randn(9, FEATURES)
    loss = pair.loss(inputs, torch.full((9,), -100))
    assert loss.item() == 0
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert not pair.loss(inputs, torch.full((9,), -100)).requires_grad


def test_the_loss_has_the_criterion_s_dtype(devices):
    outputs = (torch.ones(3, 2).half(), torch.zeros(2, 2).half())
    loss = DataParallelCriterion(nn.MSELoss(), devices(2))(outputs, torch.zeros(5, 2).half())
    assert loss.dtype == torch.half
    assert loss.item() == pytest.approx(0.6, abs=1e-3)
