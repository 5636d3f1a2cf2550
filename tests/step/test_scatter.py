"""Rows arrive micro-batch by micro-batch, one ahead of the computation, every byte
once.
"""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from harness.models import Of
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    randint,
    randn,
    whole_batch,
)
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.devices.transfers import Transfers

ROWS, FEATURES, CLASSES = 37, 8, 3
# the first is not the host either: all shares have to cross
VIRTUAL = ["cpu:0", "cpu:1", "cpu:2"]
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def room(monkeypatch):
    """How many rows a device takes at once; how often it had none, and how often it
    copied.
    """
    room, copied = SimpleNamespace(rows=4, refused=0, copies=0), Transfers.copy

    def refusing(transfers, tensor, device, phase):
        if phase == "scatter" and len(tensor) > room.rows:
            room.refused += 1
            raise torch.OutOfMemoryError(f"no room for {len(tensor)} rows")
        room.copies += phase == "scatter"
        return copied(transfers, tensor, device, phase)

    monkeypatch.setattr(Transfers, "copy", refusing)
    return room


def net():
    return build(
        lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    )


def batch(rows=ROWS):
    return randn(rows, FEATURES), randint(CLASSES, rows)


def crossed(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("accum", [4, "auto"])
def test_shares_need_room_of_sub_steps(room, accum):
    """They were scattered whole, whatever a fixed accum was."""
    model = net()
    inputs, targets = batch()
    with (
        ScatterOnceParallel(model, accum, VIRTUAL) as engine,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        assert_step(engine, inputs, targets, LOSS)
        report = engine.last_step
        assert (report.retries > 0) == (accum == "auto")
        assert report.retries <= room.refused  # a try ends when all replicas have
        assert [len(share.micro_batches) for share in report.plan.shares] == [4, 4, 4]
        assert report.bytes["scatter"] == crossed(inputs, targets)
        assert report.messages["scatter"] == 2 * 3 * 4
        with torch.no_grad():
            torch.testing.assert_close(engine.eval()(inputs), model(inputs))


def test_next_rows_copied_before_compute(room):
    seen = []

    def forward(m, inputs):
        seen.append(room.copies)
        return m.linear(inputs)

    model = build(lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES)))
    with ScatterOnceParallel(model, 4, ["cpu:1"], verify=False) as engine:
        engine.forward_backward(
            randn(8, FEATURES), None, lambda output, _: output.square().mean()
        )
    assert seen == [2, 3, 4, 4]


def of_pairs(outputs, _):
    return torch.cdist(outputs, outputs).square().mean()


@pytest.mark.parametrize("of", ["the criterion", "the second pass"])
def test_rows_kept_for_second_pass_if_room(monkeypatch, of):
    """Where it does not, it crosses twice, and is counted twice; later
    steps begin so.
    """
    copied, copies = Transfers.copy, []

    def remembering(transfers, tensor, device, phase):
        made = copied(transfers, tensor, device, phase)
        if phase == "scatter":
            copies.append(weakref.ref(made))
        return made

    def no_room(*_):
        if sum(len(made()) for made in copies if made() is not None) > 12:
            raise torch.OutOfMemoryError("no room")

    def forward(m, inputs):
        if len(inputs) > m.most:
            raise torch.OutOfMemoryError("no room")
        return m.linear(inputs)

    def criterion(outputs, _):
        no_room() if of == "the criterion" else outputs.register_hook(no_room)
        return of_pairs(outputs, _)

    monkeypatch.setattr(Transfers, "copy", remembering)
    model = build(lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES), most=24))
    inputs, _ = batch(24)
    loss, expected = whole_batch(model, inputs, None, of_pairs)
    model.most = 6
    with (
        ScatterOnceParallel(model, "auto", ["cpu:1"]) as engine,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for tries in (4, 0):  # 1, 2 and 3 sub-steps, and 4 with all rows kept
            found = engine.forward_backward(inputs, None, criterion, whole_batch=True)
            report = engine.last_step
            assert report.retries == tries
            assert len(report.plan.shares[0].micro_batches) == 4
            again = report.bytes["scatter"] - crossed(inputs)
            assert 18 * FEATURES * 8 <= again <= 24 * FEATURES * 8
    assert_close(found, loss, "loss")
    assert_gradients(model, {name: 2 * g for name, g in expected.items()})
