"""What a backward pass calls: modules that may disturb the call of another replica."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar.verify.backward_calls import BackwardCalls

pytestmark = [pytest.mark.core, pytest.mark.draws]


def plain(layer, rows):
    return layer(rows)


def checkpointed(layer, rows):
    return checkpoint(layer, rows, use_reentrant=False)


def with_tensor_hook(layer, rows):
    output = rows * layer.weight.sum()
    output.register_hook(lambda gradient: gradient + layer(gradient).detach() * 0)
    return output


@pytest.mark.parametrize(
    ("function", "calls_modules"),
    [(plain, False), (checkpointed, True), (with_tensor_hook, True)],
)
@pytest.mark.parametrize("is_of_user", [False, True])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_modules_that_backward_calls(function, calls_modules, is_of_user, is_hooked):
    layer = nn.Linear(2, 2)
    if is_hooked:
        layer.register_forward_hook(lambda *_: None)
    calls = BackwardCalls([layer] if is_of_user else [])
    loss = function(layer, torch.ones(3, 2)).sum()
    with calls:
        loss.backward()
    layer(torch.ones(3, 2))  # after the body
    assert calls.calls_modules is calls_modules
    disturbs = calls_modules and (is_of_user or is_hooked)
    # The hook is a function of the user's, which may read what calls write.
    assert calls.disturbs is (disturbs or function is with_tensor_hook)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, scale):
        ctx.scale = scale
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(getattr(ctx.scale, "number", ctx.scale)), None


class Number:
    number = 2.0


@pytest.mark.parametrize(("scale", "disturbs"), [(2.0, False), (Number(), True)])
def test_function_of_autograd_disturbs_by_objects(scale, disturbs):
    """A number in ``ctx`` is that of the forward pass, an attribute is the last."""
    calls = BackwardCalls([])
    loss = Scaled.apply(torch.ones(3, requires_grad=True), scale).sum()
    with calls:
        loss.backward()
    assert not calls.calls_modules
    assert calls.disturbs is disturbs


def test_users_profiler_is_left_alone():
    seen = []

    def profile(frame, event, _):
        seen.append(event)

    sys.setprofile(profile)
    try:
        with BackwardCalls([]):
            assert sys.getprofile() is profile
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert seen
