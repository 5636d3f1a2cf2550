"""What *Silently wrong* says of writes through ``.data``, and of outputs."""

from __future__ import annotations

import pytest
import torch
from harness.models import Of
from harness.oracle import build
from harness.pages import blocks, read
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel, gather

PAGE = read("docs/silently-wrong.md")
(RIGHT,) = blocks(PAGE, "python")
VIRTUAL = ["cpu:0", "cpu:1"]
# The programs of the rows about writes through ``.data``.
BEFORE_BACKWARD = """
loss = engine(x).sum()
weight.data.mul_(3)
engine(x)
loss.backward()
engine(x)
"""
NO_SYNC = """
with engine.no_sync():
    engine(x).sum().backward()
    weight.data.mul_(3)
    engine(x).sum().backward()
engine(x).sum().backward()
engine(x)
"""
TEACHER = """
teacher(x).detach()
weight.data.mul_(3)
teacher(x).detach()
with torch.no_grad():
    teacher(x)
"""
# The factors of both devices in each call of a program: the new weight is 3.
WRITES = {
    RIGHT + "engine(x)\n": [(3, 3)],
    BEFORE_BACKWARD: [(1, 1), (3, 1), (3, 3)],
    NO_SYNC: [(1, 1), (3, 1), (3, 1), (3, 3)],
    TEACHER: [(1, 1), (3, 1), (3, 3)],
}


def scaled(net, rows):
    return rows * net.weight


def scale(function=scaled, **attributes):
    """A module with one weight per column."""
    return Of(function, weight=nn.Parameter(torch.ones(3)), **attributes)


class Recorder:
    """An engine, and the factors of both devices in each of its calls."""

    def __init__(self, model):
        self.engine = ScatterOnceParallel(model, device_ids=VIRTUAL)
        self.no_sync = self.engine.no_sync
        self.factors = []

    def __call__(self, rows):
        output = self.engine(rows)
        self.factors.append((output[0, 0].item(), output[-1, 0].item()))
        return output


@pytest.mark.parametrize("code", WRITES)
def test_late_writes_are_those_of_the_page(code):
    model = build(scale)
    recorder = Recorder(model)
    names = {"torch": torch, "x": torch.ones(4, 3).double(), "weight": model.weight}
    names |= {"engine": recorder, "teacher": recorder}
    if code.startswith(RIGHT):
        recorder(names["x"])
        recorder.factors.clear()
    exec(code, names)
    assert recorder.factors == WRITES[code]


@pytest.mark.parametrize("is_mended", [False, True])
def test_kept_view_is_stale_on_other_replicas(is_mended):
    def forward(net, x):
        if net.view is None:
            net.view = net.weight.detach()
        return x * (net.weight.detach() if is_mended else net.view)

    model = build(lambda: scale(forward, view=None))
    recorder = Recorder(model)
    rows = torch.ones(4, 3).double()
    with torch.no_grad():
        recorder(rows)
        model.weight.data.mul_(3)
        with pytest.warns(UserWarning, match="'view'"):
            recorder(rows)
        recorder(rows)
    factors = (3, 3) if is_mended else (3, 1)
    assert recorder.factors == [(1, 1), factors, factors]


def test_late_write_in_large_buffer_seen_in_step_16():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("table", torch.zeros(4_000_000))

        def forward(self, rows):
            return self.linear(rows) + self.table[1_777_777]

    model = build(Large)
    rows = torch.ones(4, 3).double()
    stale = []
    with ScatterOnceParallel(model, device_ids=VIRTUAL) as engine:
        for step in range(1, 20):
            if step >= 10:
                model.table.data[1_777_777] = step
            output = engine(rows)
            output.sum().backward()
            if (output - model(rows)).abs().max() > 0.5:
                stale.append(step)
    assert stale == list(range(10, 16))
    assert "the next step whose number is a power of two" in PAGE


def test_gather_joins_two_entries_in_another_order():
    model = build(lambda: Of(lambda net, rows: torch.cat([rows, -rows])))
    first, second = rows = torch.arange(8.0).split(4)
    outputs = DataParallelModel(model, device_ids=VIRTUAL)(torch.cat(rows))
    joined = gather(outputs, "cpu")
    assert joined.tolist() == torch.cat([first, -first, second, -second]).tolist()


def test_evaluation_keeps_the_attributes_of_the_module():
    def forward(net, rows):
        net.total = net.total + rows.sum().item()
        net.calls += 1
        return rows * net.weight

    model = build(lambda: scale(forward, total=0.0, calls=torch.zeros(()))).eval()
    with ScatterOnceParallel(model, device_ids=VIRTUAL) as engine, torch.no_grad():
        for _ in range(3):
            engine(torch.ones(4, 3).double())
    assert model.total == 0
    assert model.calls == 0


@pytest.mark.parametrize("ids", [["cpu"], ["cpu"] * 2, VIRTUAL], ids="+".join)
def test_hook_in_step_stores_one_micro_batch(ids):
    model = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    stored = {}

    def store(module, inputs, output):
        stored["features"] = output.detach()

    model[0].register_forward_hook(store)
    rows, labels = torch.ones(8, 3).double(), torch.zeros(8, dtype=torch.long)
    with ScatterOnceParallel(model, accum=2, device_ids=ids) as engine:
        engine.forward_backward(rows, labels, nn.CrossEntropyLoss())
    assert len(stored["features"]) == 8 // (2 * len(ids))
