"""Looks, checks and tries leave what user code of a call may move: also what it gets."""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import build, randn
from torch import nn
from torch.nn import functional as F

from scatterpar import Replicated, Rows, ScatterOnceParallel

ROWS, VALUES = randn(9, FEATURES), randn(9, CLASSES)


class Schedule:
    """An object that counts its uses."""

    def __init__(self):
        self.calls = 0
        self.history = []

    def factor(self):
        self.calls += 1
        self.history.append(self.calls)
        return 1 + 0.1 * self.calls


def scaled(m, rows, schedule):
    return m.linear(rows) * schedule.factor()


def noisy(m, rows, generator):
    return m.linear(rows) + torch.rand(CLASSES, generator=generator, dtype=rows.dtype)


def model(forward):
    return build(lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES)))


ARGUMENTS = {
    "an object": (scaled, Schedule, lambda value: value),
    "a replicated object": (scaled, Schedule, Replicated),
    "a generator": (
        noisy,
        lambda: torch.Generator().manual_seed(0),
        lambda value: value,
    ),
}


@pytest.mark.filterwarnings("ignore:.*calls.*")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_look_leaves_argument(name):
    """It trained otherwise than plain torch: looks moved it."""
    forward, make, passed = ARGUMENTS[name]
    net, value = model(forward), make()
    expected = [F.mse_loss(net(ROWS, value), VALUES).item() for _ in range(4)]
    value = make()
    with ScatterOnceParallel(net, 1, ["cpu"]) as engine:
        losses = [
            engine.forward_backward((ROWS, passed(value)), VALUES, F.mse_loss).item()
            for _ in range(4)
        ]
    assert losses == pytest.approx(expected, rel=1e-12)
    if isinstance(value, Schedule):
        assert value.calls == len(value.history) == 4


@pytest.mark.parametrize("accum", [1, 3])
def test_look_leaves_what_collate_and_count_keep(accum):
    seen = {"collate": [], "count": []}

    def collate(few):
        seen["collate"].append(len(few))
        return torch.stack(few)

    def count(inputs, targets):
        seen["count"].append(len(targets))
        return len(targets)

    def loss(output, targets):
        return F.mse_loss(output, targets)

    moved = []
    for verify in (True, False):
        for values in seen.values():
            values.clear()
        with ScatterOnceParallel(linear(), accum, ["cpu"], verify=verify) as engine:
            for _ in range(4):
                engine.forward_backward(
                    Rows(list(ROWS), collate), VALUES, loss, count=count
                )
        moved.append({name: [*values] for name, values in seen.items()})
    assert moved[0] == moved[1]


def test_check_leaves_closures(devices):
    losses, schedule = [], Schedule()

    def criterion(output, targets):
        losses.append(schedule.factor())
        return F.mse_loss(output, targets)

    with ScatterOnceParallel(linear(), 2, devices(2)) as engine:
        report = engine.check(ROWS, VALUES, criterion)
    assert report.passed
    assert losses == []
    assert schedule.calls == 0


class Limited(nn.Module):
    """Draws, counts, and runs out of memory above three rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, rows):
        noise = torch.rand(CLASSES, generator=self.generator, dtype=rows.dtype)
        if len(rows) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return self.linear(rows) + noise


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["step", "map"])
def test_tries_that_run_out_of_memory_leave_no_trace(way):
    """They drew from the module's generator, and moved closures."""

    def run(accum):
        calls = []

        def criterion(output, targets):
            calls.append(len(output))
            return F.mse_loss(output, targets)

        def mapped(replica, rows):
            calls.append(len(rows))
            return replica(rows)

        results = []
        with ScatterOnceParallel(
            build(Limited), accum, ["cpu"], verify=False
        ) as engine:
            for _ in range(3):
                if way == "step":
                    results.append(engine.forward_backward(ROWS, VALUES, criterion))
                else:
                    results.append(engine.map(mapped, ROWS).sum())
        return [result.item() for result in results], calls

    assert run("auto") == run(3)
