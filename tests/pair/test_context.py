"""The replicas run side by side, each in the caller's whole context."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from harness.freed import in_time
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_close, build, randint, randn
from torch import nn

from pair.common import Pair, Shared
from scatterpar import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.core

BATCH = randn(8, FEATURES), randint(CLASSES, 8)


@pytest.mark.parametrize("part", ["model", "criterion"])
def test_replicas_run_at_the_same_time(devices, part):
    """Each waits for all the others: one after the other, they would never come to an end."""
    barrier = threading.Barrier(4, timeout=120)

    class Meets(nn.Module):
        def forward(self, output, targets=None):
            barrier.wait()
            return output if targets is None else output.mean()

    model = DataParallelModel(Meets() if part == "model" else nn.Identity(), devices(4))
    outputs = model(BATCH[0])
    if part == "criterion":
        loss = DataParallelCriterion(Meets(), devices(4))(outputs, BATCH[1])
        assert_close(loss, BATCH[0].mean(), "loss")
    assert len(outputs) == 4


class Asks(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.question, self.answers = question, Shared()

    def forward(self, output, targets=None):
        self.answers.found.append(self.question())
        return output if targets is None else output.mean()


def ask(question, device_ids):
    model, criterion = Asks(question), Asks(question)
    outputs = DataParallelModel(model, device_ids)(BATCH[0])
    DataParallelCriterion(criterion, device_ids)(outputs, BATCH[1])
    assert len(model.answers.found) == len(criterion.answers.found) == 3
    return [*model.answers.found, *criterion.answers.found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_autocast_and_its_dtype(devices, dtype):
    """A thread starts without autocast, and with its default dtype."""

    def question():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    with torch.autocast("cpu", dtype=dtype):
        assert ask(question, devices(3)) == [(True, dtype)] * 6
    assert ask(question, devices(3)) == [(False, torch.bfloat16)] * 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_there_is_no_graph(devices, mode):
    pair, inferring = Pair(mlp(), nn.CrossEntropyLoss(), devices(3)), mode is torch.inference_mode
    expected = nn.CrossEntropyLoss()(pair.module(BATCH[0]), BATCH[1]).detach()
    with mode():
        outputs = pair.model(BATCH[0])
        loss = pair.criterion(outputs, BATCH[1])
        assert ask(torch.is_inference_mode_enabled, devices(3)) == [inferring] * 6
    assert all(output.is_inference() == inferring for output in outputs)
    assert not any(tensor.requires_grad for tensor in (*outputs, loss))
    assert_close(loss, expected, "loss")
    assert ask(torch.is_grad_enabled, devices(3)) == [True] * 6
    pair.check(*BATCH)


def test_eval_and_train_reach_the_replicas(devices):
    model = nn.Sequential(mlp(), nn.Dropout(1.0))
    pair = DataParallelModel(model, devices(3))
    for mode, p in ((model.eval, 1.0), (model.train, 0.0), (model[1].eval, 1.0)):
        mode()
        model[1].p = p
        assert_close(torch.cat(pair(BATCH[0])), model[0](BATCH[0]), "outputs")


def test_nothing_of_a_forward_survives_its_outputs(devices):
    """Replicas are not kept, and go with the graph, without waiting for the collector."""
    alive = []

    class Remembers(nn.Linear):
        def forward(self, inputs):
            output = super().forward(inputs)
            alive.extend(map(weakref.ref, (self, output)))
            return output

    pair = Pair(build(lambda: Remembers(FEATURES, CLASSES)), nn.CrossEntropyLoss(), devices(3))
    gc.collect()
    gc.disable()
    try:
        loss = pair.loss(*BATCH)
        assert len(alive) == 6
        loss.backward()
        del loss
        assert in_time(lambda: [reference() for reference in alive] == [None] * 6)
    finally:
        gc.enable()
