"""What accelerate tests of its gradient accumulation, asked of the engine, in words of our own.

After tests/test_grad_sync.py and test_utils/scripts/test_sync.py of
https://github.com/huggingface/accelerate. Its ``accumulate()`` window of loader batches is
``Rows.from_batches`` here, its ``no_sync()`` several steps without ``zero_grad()``.

Cases without a meaning here, and why:

* "gradients are not in sync in between": no process ever holds half a gradient. What stands in
  its place: between two calls the gradient is that of the batches so far.
* ``sync_each_batch``, ``split_batches``, ``dispatch_batches``: how processes share a loader. There
  is one process, and the engine cuts the batch.
* ``test_dataloader_break``: accelerate keeps the loader that is active in a global state, to know
  an epoch's last window. The engine knows of no loader: the last window is as long as it is.
* starting the processes: tests/test_ranks.py and its neighbours.

One answer differs on purpose. accelerate divides an epoch's last, shorter window by the number of
batches that a full one has; here it is the mean over the rows that there are.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from helpers.oracle import assert_close, assert_gradients, build, gradients, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scatterpar import DataParallelCriterion, DataParallelModel, Rows, ScatterOnceParallel

CRITERION = nn.MSELoss()


class Regression(nn.Module):
    """A line: y = a x + b."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3))
        self.b = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x):
        return x * self.a + self.b


def points(length=80):
    x = randn(length)
    return TensorDataset(x, 2 * x + 3 + 0.1 * randn(length, seed=2))


def loader(length=80, rows=16):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(points(length), rows, shuffle=True, generator=generator)


def windows(batches, length):
    """The batches in windows of ``length``; the last one may be shorter."""
    batches = iter(batches)
    while window := list(islice(batches, length)):
        yield window


def two():
    return build(Regression), build(Regression)


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_without_zero_grad_add_up(devices, replicas):
    """Whatever the number of replicas: a loop that only adds, in step with one device's."""
    model, plain = two()
    with ScatterOnceParallel(model, 2, devices(replicas)) as engine:
        for x, y in islice(loader(), 3):
            engine.forward_backward(x, y, CRITERION)
            CRITERION(plain(x), y).backward()
            assert_gradients(model, gradients(plain))


def test_several_forwards_and_then_their_backwards(devices):
    """Each backward adds its own, in whatever order; the last one makes the whole."""
    model, plain = two()
    net, criterion = DataParallelModel(model, devices(2)), DataParallelCriterion(CRITERION)
    batches = list(islice(loader(), 3))
    losses = [criterion(net(x), y) for x, y in batches]
    expected = [CRITERION(plain(x), y) for x, y in batches]
    for i in (1, 2, 0):
        losses[i].backward()
        expected[i].backward()
        assert_gradients(model, gradients(plain))


def window_of(batches):
    xs, ys = zip(*batches, strict=True)
    return Rows.from_batches(list(xs)), Rows.from_batches(list(ys))


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("length", [80, 75], ids=["even", "a short last batch"])
def test_windows_of_batches(devices, steps, length):
    """Five batches in windows of two or three: the last window is the shorter one."""
    model, plain = two()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for window in windows(loader(length), steps):
            engine.forward_backward(*window_of(window), CRITERION)
            rows = sum(len(y) for _, y in window)
            for x, y in window:
                (CRITERION(plain(x), y) * len(y) / rows).backward()
            assert_gradients(model, gradients(plain))
            model.zero_grad()
            plain.zero_grad()


def test_windows_with_an_optimizer_and_a_schedule(devices):
    """The optimizer and the schedule step once a window, and have the loop's own rates."""
    model, plain = two()
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, plain)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: (step + 1) ** 0.65) for o in optimizers
    ]
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for _ in range(2):
            for window in windows(loader(), 2):
                loss = engine.forward_backward(*window_of(window), CRITERION)
                x, y = (torch.cat(columns) for columns in zip(*window, strict=True))
                expected = CRITERION(plain(x), y)
                expected.backward()
                assert_close(loss, expected.detach(), "loss")
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
                assert rates[0] == rates[1]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter")


@pytest.mark.parametrize("accum", [2, 4])
def test_the_engine_s_own_accumulation_is_one_large_batch(devices, accum):
    """Accumulation's promise itself: as many small batches as one large one."""
    model, plain = two()
    x, y = points(64).tensors
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        engine.forward_backward(x, y, CRITERION)
        assert len(engine.last_step.plan.shares[0].micro_batches) == accum
    CRITERION(plain(x), y).backward()
    assert_gradients(model, gradients(plain))


def test_frozen_parameters_have_no_gradient(devices):
    """accelerate skips them in its comparisons; here they are compared too."""
    model, plain = two()
    for one in (model, plain):
        one.b.requires_grad_(False)
    x, y = points(16).tensors
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(x, y, CRITERION)
    CRITERION(plain(x), y).backward()
    assert model.b.grad is None
    assert_gradients(model, gradients(plain))


def test_a_loader_left_in_the_middle(devices):
    """Another loader's epoch within a window: there is no state that could mix them up."""
    model, plain = two()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for step, window in enumerate(windows(loader(), 2)):
            if step == 1:
                engine.eval()
                held_out = [CRITERION(engine(x), y) for x, y in loader(96)]
                engine.train()
                assert len(held_out) == 6
                break
            engine.forward_backward(*window_of(window), CRITERION)
            x, y = (torch.cat(columns) for columns in zip(*window, strict=True))
            CRITERION(plain(x), y).backward()
    assert_gradients(model, gradients(plain))
