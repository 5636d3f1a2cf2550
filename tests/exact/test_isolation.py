"""On virtual devices, no operation ever mixes tensors of two memories.

The engine's replicas run in workers of their own, and so do the pair's; but the pair's
``backward()`` is the user's and runs in the caller's thread: there each operation must be in one
memory too, and the gradient must cross where the parameters crossed.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from harness.isolation import MixedMemories, guarded
from harness.models import CLASSES, FEATURES, Returns, mlp
from harness.notes import beginning_of_note
from harness.oracle import assert_close, build, randint, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

VIRTUAL = [f"cpu:{i}" for i in range(4)]
MASTER = torch.device("cpu:0")
BATCH = randn(9, FEATURES), randint(CLASSES, 9)


def test_batch_statistics(monkeypatch):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    batch = randn(16, FEATURES), randint(CLASSES, 16)
    with (
        ScatterOnceParallel(model, 2, VIRTUAL, buffers="batch") as engine,
        guarded(monkeypatch, model) as memories,
    ):
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
    assert len(memories.checked) == 4


def test_inference_and_outputs(monkeypatch):
    model = mlp()
    expected = model(BATCH[0]).detach()
    with ScatterOnceParallel(model, 2, VIRTUAL) as engine, guarded(monkeypatch, model) as memories:
        _, outputs = engine.forward_backward(*BATCH, nn.CrossEntropyLoss(), return_outputs=True)
        assert [memories.owner(output) for output in outputs] == list(map(torch.device, VIRTUAL))
        engine.eval()
        gathered = engine(BATCH[0])
        assert memories.owner(gathered) == MASTER
    assert_close(gathered, expected, "outputs")


def test_batch_statistics_and_the_gradient_of_the_inputs_of_the_pair(monkeypatch):
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6)))
    twin = copy.deepcopy(model)
    inputs, same = (BATCH[0].clone().requires_grad_() for _ in range(2))
    pieces = [copy.deepcopy(model)(rows) for rows in same.tensor_split(4)]
    sum(piece.square().sum() for piece in pieces).backward()
    twin(BATCH[0][:3])
    criterion = DataParallelCriterion(lambda o, t: o.square().sum(), VIRTUAL)
    pair = DataParallelModel(model, VIRTUAL)
    with guarded(monkeypatch, model) as memories:
        criterion(pair(inputs), torch.zeros(9), reduction="sum").backward()
        assert memories.owner(model[1].running_mean) == MASTER
        assert memories.owner(inputs.grad) in (None, MASTER, torch.device("cpu"))
    assert_close(model[1].running_mean, twin[1].running_mean, "mean")
    assert_close(inputs.grad, same.grad, "inputs")


def test_the_guard_can_fail(monkeypatch):
    """Replica 0 leaves a tensor where replica 1 picks it up: an error on GPUs."""
    passed, ready = [], threading.Event()

    def smuggle(logits, inputs):
        if inputs[0, 0] == 0:
            passed.append(logits.detach())
            ready.set()
            return logits
        ready.wait(120)
        return logits + passed[0]

    model = build(lambda: Returns(smuggle))
    inputs = randn(4, FEATURES)
    inputs[:, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    with (
        ScatterOnceParallel(model, 1, VIRTUAL[:2], verify=False) as engine,  # a look would wait
        guarded(monkeypatch, model),
        pytest.raises(MixedMemories, match=r"aten.add.*on cpu:1 mixes tensors of") as caught,
    ):
        engine.forward_backward(inputs, randint(CLASSES, 4), nn.CrossEntropyLoss())
    assert caught.value.__notes__[0].startswith(beginning_of_note(1, "cpu:1", 0, of=1))
