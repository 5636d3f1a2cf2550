"""last_step: what crossed from one memory to another, counted where it was copied."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel, StepReport

VIRTUAL = [f"cpu:{i}" for i in range(4)]
PHASES = {"scatter", "replicate", "compute", "reduce"}


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def with_batch_norm():
    return build(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)
        )
    )


def step(model, device_ids, rows=64, accum=3, **options):
    batch = randn(rows, FEATURES), randint(CLASSES, rows)
    with ScatterOnceParallel(model, accum, device_ids, **options) as engine:
        for _ in range(2):  # the first step builds the replicas; both cost the same
            model.zero_grad()
            engine.forward_backward(*batch, nn.CrossEntropyLoss())
            yield engine.last_step, size(batch)


@pytest.mark.parametrize("accum", [1, 3, 8])
@pytest.mark.parametrize("factory", [mlp, with_batch_norm])
def test_every_byte_once(factory, accum):
    model = factory()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    for report, batch in step(model, VIRTUAL, accum=accum):
        assert report.bytes == {
            "scatter": batch,
            "replicate": 3 * size([*parameters, *buffers]),
            "compute": 0,
            "reduce": 3 * size(parameters),
        }


def test_averaged_buffers_travel_back_too():
    model = with_batch_norm()
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for report, _ in step(model, VIRTUAL, buffers="mean"):
        assert report.bytes["reduce"] == 3 * size([*model.parameters(), *floating])


def test_few_messages_whatever_the_number_of_parameters():
    deep = build(lambda: nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(30)]))
    for report, _ in step(deep, VIRTUAL):
        assert report.messages == {"scatter": 4 * 2, "replicate": 3, "compute": 0, "reduce": 3}
    for report, _ in step(with_batch_norm(), VIRTUAL):  # one more dtype: a count of batches
        assert report.messages["replicate"] == 3 * 2
        assert report.messages["reduce"] == 3


def test_replicas_in_one_memory_move_nothing():
    for report, _ in step(with_batch_norm(), ["cpu"] * 4, buffers="mean"):
        assert report.bytes == dict.fromkeys(PHASES, 0)
        assert report.messages == dict.fromkeys(PHASES, 0)


def test_replicas_that_share_a_virtual_device_cost_one_refresh():
    """Parameters go out to each other device, not to each replica."""
    model = mlp()
    for report, batch in step(model, ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]):
        assert report.bytes["replicate"] == size(model.parameters())
        assert report.bytes["scatter"] == batch


def test_devices_without_rows_send_nothing_back():
    model = mlp()
    for report, batch in step(model, VIRTUAL, rows=2):
        assert report.bytes["scatter"] == batch
        assert report.bytes["reduce"] == size(model.parameters())


def test_frozen_parameters_go_out_and_do_not_come_back():
    model = mlp()
    model[0].requires_grad_(False)
    for report, _ in step(model, VIRTUAL):
        assert report.bytes["replicate"] == 3 * size(model.parameters())
        assert report.bytes["reduce"] == 3 * size(model[2].parameters())


def test_sparse_gradients_travel_as_indices_and_values():
    model = build(lambda: nn.EmbeddingBag(1000, 3, sparse=True, mode="sum"))
    ids = torch.tensor([[1, 2], [1, 3], [5, 5], [7, 8]])
    with ScatterOnceParallel(model, 1, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(ids, None, lambda output, _: output.pow(2).mean())
        report = engine.last_step
    assert 0 < report.bytes["reduce"] < 1000
    assert report.bytes["replicate"] == 1000 * 3 * 8


def test_the_report():
    model = mlp()
    with ScatterOnceParallel(model, 2, VIRTUAL) as engine:
        assert engine.last_step is None
        loss = engine.forward_backward(
            randn(9, FEATURES), randint(CLASSES, 9), nn.CrossEntropyLoss()
        )
        report = engine.last_step
        assert isinstance(report, StepReport)
        assert report.plan == engine.plan(9)
        assert report.loss == loss.item()
        assert report.seconds.keys() == report.bytes.keys() == report.messages.keys() == PHASES
        assert all(seconds > 0 for seconds in report.seconds.values())
        assert report.retries == 0


def test_a_failed_step_is_not_reported():
    model = mlp()
    with ScatterOnceParallel(model, 2, VIRTUAL) as engine:
        engine.forward_backward(randn(9, FEATURES), randint(CLASSES, 9), nn.CrossEntropyLoss())
        report = engine.last_step
        with pytest.raises(RuntimeError):
            engine.forward_backward(randn(9, 3), randint(CLASSES, 9), nn.CrossEntropyLoss())
        assert engine.last_step is report
