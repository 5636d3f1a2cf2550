"""The bugs that torchgpipe remembers, asked of the engine and of the pair.

In words of our own, after tests/test_bugs.py of https://github.com/kakaobrain/torchgpipe. Every
case has a meaning here. The third one is about CUDA's streams: on the CPU it asks that a slow
backward of one of several tensors is waited for, and with an accelerator (mark ``cuda``) what the
original asks.
"""

from __future__ import annotations

import time

import pytest
import torch
from helpers.oracle import assert_close, assert_gradients, build, gradients, randn
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scatterpar import DataParallelModel, ScatterOnceParallel, gather


class Identity(torch.autograd.Function):
    """Returns the very tensor that it was given."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Same(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        if self.again:
            inputs = checkpoint(Identity.apply, inputs * self.scale, use_reentrant=False)
        return Identity.apply(Identity.apply(inputs) * self.scale)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_a_function_that_returns_its_input(devices, again):
    """A shared storage came back from a Python function, and autograd refused it."""
    model, plain = (build(lambda: Same(again)) for _ in range(2))
    inputs = randn(7, 3)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(inputs, criterion=lambda output, _: output.square().mean())
        assert_close(engine.eval()(inputs), inputs, "output")
    plain(inputs).square().mean().backward()
    assert_gradients(model, gradients(plain))
    assert_close(gather(DataParallelModel(model, devices(2))(inputs), "cpu"), inputs, "output")
    bare = DataParallelModel(IdentityAlone(), devices(2))
    assert torch.equal(gather(bare(inputs), "cpu"), inputs)


class IdentityAlone(nn.Module):
    def forward(self, inputs):
        return Identity.apply(inputs)


class ExpectedError(Exception):
    pass


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_failure_in_some_micro_batch_hangs_nobody(devices, row, replicas):
    """A partition that had failed did not take what came after, and its neighbour waited."""

    class Stumbles(nn.Linear):
        def forward(self, inputs):
            if (inputs[:, 0] == 99).any():
                raise ExpectedError
            return super().forward(inputs)

    model = build(lambda: Stumbles(2, 1))
    inputs = randn(3, 2)
    bad = inputs.clone()
    bad[row, 0] = 99
    with ScatterOnceParallel(model, 3 // replicas, devices(replicas)) as engine:
        for _ in range(2):
            with pytest.raises(ExpectedError):
                engine.forward_backward(bad, criterion=lambda output, _: output.mean())
            assert model.weight.grad is None
        engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
        assert_close(model.weight.grad, inputs.mean(0, keepdim=True), "gradient")


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.detach()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.is_cuda:
            torch.cuda._sleep(10_000_000)
        else:
            time.sleep(0.002)
        return gradient


class Three(nn.Module):
    """Its middle tensor's gradient comes late."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, a, b):
        one, two, three = a * self.weight[0], b * self.weight[1], b * self.weight[2]
        return one + Slow.apply(two) + three


def step_of_three(device_ids, device, rows):
    model = Three().double().to(device)
    a, b = randn(rows, 4), randn(rows, 4, seed=2)
    with ScatterOnceParallel(model, 4, device_ids) as engine:
        engine.forward_backward((a, b), criterion=lambda output, _: output.sum(), reduction="sum")
    expected = torch.stack([a.sum(0), b.sum(0), b.sum(0)])
    assert_close(model.weight.grad.cpu(), expected, "weight")


def test_every_tensor_of_a_batch_is_waited_for(devices):
    """Only the first tensor of a tuple was; the gradients of others came too late."""
    step_of_three(devices(2), "cpu", 16)
    model = DataParallelModel(Three().double(), devices(2))
    a, b = (randn(8, 4, seed=seed).requires_grad_() for seed in (1, 2))
    gather(model(a, b), "cpu").sum().backward()
    assert torch.equal(a.grad, torch.ones(8, 4))
    assert torch.equal(b.grad, torch.full((8, 4), 2.0, dtype=torch.float64))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_tensor_of_a_batch_is_waited_for_on_streams():
    step_of_three([0, 0], "cuda:0", 1024)


class Dropouts(nn.Module):
    """Drops few of many elements a hundred times, under checkpointing."""

    def __init__(self, again):
        super().__init__()
        self.again = again

    def drop(self, x):
        for _ in range(30):
            x = functional.dropout(x, 0.01)
        return x

    def forward(self, x):
        if not self.again:
            return self.drop(x)
        return checkpoint(self.drop, x, use_reentrant=self.again == "reentrant")


AGAIN = ["reentrant", "not reentrant"]


@pytest.mark.draws
@pytest.mark.parametrize("again", AGAIN)
def test_random_numbers_of_parallel_recomputation(devices, again):
    """What a recomputation draws is what was drawn: zeros in the output are zeros in the gradient.

    Threads that share the process's generator take each other's numbers.
    """
    model = DataParallelModel(nn.Sequential(Dropouts(again), Dropouts(again)), devices(2))
    inputs = randn(10, 10).abs().add(1).requires_grad_()
    output = gather(model(inputs), "cpu")
    output.norm().backward()
    assert 0 < (output == 0).sum() < 100
    assert torch.equal(output == 0, inputs.grad == 0)


@pytest.mark.draws
@pytest.mark.parametrize("again", ["", *AGAIN])
@pytest.mark.parametrize("whole_batch", [False, True])
def test_random_numbers_of_parallel_sub_steps(devices, again, whole_batch):
    """The engine's own second pass recomputes too: each row has a parameter that tells."""

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.marks = nn.Parameter(torch.ones(10, 10, dtype=torch.float64))
            self.drops = nn.Sequential(Dropouts(again), Dropouts(again))

        def forward(self, inputs, rows):
            return self.drops(inputs * self.marks[rows])

    model = Marked()
    inputs = randn(10, 10).abs() + 1
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        _, outputs = engine.forward_backward(
            (inputs, torch.arange(10)),
            criterion=lambda output, _: output.square().mean(),
            return_outputs=True,
            whole_batch=whole_batch,
        )
    output = gather(outputs, "cpu")
    assert 0 < (output == 0).sum() < 100
    assert torch.equal(output == 0, model.marks.grad == 0)
    assert_close(model.marks.grad, output.square() / 50, "gradient")
