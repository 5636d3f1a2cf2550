"""What a clipping before the last one does to a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from scatterpar.splitting.clippings import Clippings
from scatterpar.torch_private.clipping import clipping_replaced


@pytest.mark.parametrize(
    ("limits", "left"),
    [([1.0], 1.0), ([1.0, 1.0], 1.5), ([1.0, math.inf], 2.0), ([math.inf, 1.0], 2.0)],
)
@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_all_clippings_but_the_last_halve(clip, limits, left):
    """A gradient of 1 is added before each clipping: 1 / 2 + 1.

    No limit is exceeded; an infinite one is none.
    """
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    with clipping_replaced(Clippings()):
        for limit in limits:
            weight.grad += 1
            clip([weight], 10 * limit)
    assert weight.grad.item() == left


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda gradient: gradient + 2, 2.5),
        (lambda gradient: gradient * (1 + 1e-9), 1.0),  # rounding is no change
        (lambda gradient: None, None),
        (torch.zeros_like, 0.0),  # after an update by hand
    ],
)
def test_gradient_in_a_new_tensor_was_clipped(change, left):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones(1, dtype=torch.float64)
    clippings = Clippings()
    clippings([weight])
    weight.grad = change(weight.grad)
    clippings.end()
    remaining = None if weight.grad is None else weight.grad.item()
    assert remaining == (None if left is None else pytest.approx(left))


@pytest.mark.parametrize("zeroed", [None, torch.zeros(1)])
def test_gradient_accumulated_anew_was_not_clipped(zeroed):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    clippings = Clippings()
    clippings([weight])
    weight.grad = zeroed
    clippings.before_backward()
    weight.grad = torch.full((1,), 3.0)
    clippings.end()
    assert weight.grad.item() == 3
