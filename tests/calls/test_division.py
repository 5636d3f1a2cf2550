"""Rows are divided and joined; both are differentiable, twice."""

import pytest
import torch
from harness.oracle import randn

from scatterpar.calls.copies_in_graph import AutogradTransfers
from scatterpar.calls.division import Division, are_divided_alike
from scatterpar.calls.gradients import CallGradients
from scatterpar.plan import make_plan


def division_of(devices, dim=0, rows=5):
    plan = make_plan(rows, [torch.device(name) for name in devices])
    gradients = CallGradients([share.device for share in plan.shares])
    passes = []
    gradients.begin_pass = lambda: passes.append(1)
    return Division(plan, dim, AutogradTransfers(), gradients), passes


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_split_and_join_are_inverse_in_both_directions(dim):
    division, passes = division_of(["cpu:0", "cpu:1"], dim)
    whole = randn(5, 5).requires_grad_()
    inputs = division.split_call(((whole,), {}))
    parts = [args[0] for args, _ in inputs]
    joined = division.join([part * 2 for part in parts])
    (gradient,) = torch.autograd.grad(joined.pow(3).sum(), whole, create_graph=True)
    torch.testing.assert_close(gradient, 3 * (2 * whole) ** 2 * 2)
    gradient.sum().backward()
    torch.testing.assert_close(whole.grad, 48 * whole.detach())
    assert passes


def test_copies_are_counted():
    division, _ = division_of(["cpu:0", "cpu:1"])
    parts = [torch.ones(3, 2), torch.ones(2, 2)]
    division.join(parts)
    assert division.transfers.bytes["compute"] == parts[1].nbytes


def test_joined_images_keep_their_memory_format():
    division, _ = division_of(["cpu"] * 2)
    parts = [
        randn(rows, 3, 4, 4).to(memory_format=torch.channels_last) for rows in (3, 2)
    ]
    assert division.join(parts).is_contiguous(memory_format=torch.channels_last)


def test_have_rows_asks_for_alike_tensors():
    rows = [3, 2]
    assert are_divided_alike([randn(3, 4), randn(2, 4)], rows, 0)
    assert not are_divided_alike([randn(3, 4), randn(2, 5)], rows, 0)
    assert not are_divided_alike([randn(3), randn(())], rows, 0)
    assert not are_divided_alike([randn(3, 4), randn(2, 4).float()], rows, 0)
