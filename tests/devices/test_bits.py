"""Tensors are compared bit by bit."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.bits import same_bits

NAN = torch.tensor([torch.nan])
SAME = [
    (torch.ones(2), torch.ones(2), True),
    (NAN, NAN.clone(), True),
    (torch.zeros(1), -torch.zeros(1), False),
    (torch.ones(2), torch.ones(2, 1), False),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
    (torch.ones(1).expand(3), torch.ones(3), True),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
    (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
    (torch.eye(2), torch.eye(2).to_sparse(), False),
]


@pytest.mark.parametrize(("first", "second", "expected"), SAME)
def test_same_bits_compares_bits(first, second, expected):
    assert same_bits(first, second) is expected
