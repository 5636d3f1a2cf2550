"""On virtual devices, no operation ever mixes tensors of two memories.

The engine's replicas run in workers of their own, and so do the pair's; but the pair's
``backward()`` is the user's and runs in the caller's thread: there each operation must be in one
memory too, and the gradient must cross where the parameters crossed. More cases: ``test_cases.py``.
"""

import threading

import pytest
import torch
from harness.isolation import HOST, MixedMemories, guarded
from harness.models import CLASSES, FEATURES, Returns, mlp
from harness.notes import beginning_of_note
from harness.oracle import build, randint, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

VIRTUAL = [f"cpu:{i}" for i in range(4)]
MASTER = torch.device("cpu:0")
BATCH, CRITERION = (randn(9, FEATURES), randint(CLASSES, 9)), nn.CrossEntropyLoss()


def test_batch_statistics_outputs_and_inference(monkeypatch):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    with (
        ScatterOnceParallel(model, 1, VIRTUAL, buffers="batch") as engine,
        guarded(monkeypatch, model) as memories,
    ):
        _, outputs = engine.forward_backward(*BATCH, CRITERION, return_outputs=True)
        assert [memories.owner(output) for output in outputs] == list(map(torch.device, VIRTUAL))
        assert memories.owner(model[0].running_mean) == MASTER
        assert memories.owner(engine.eval()(BATCH[0])) == MASTER
    assert len(memories.checked) == 4


def test_the_gradient_of_the_inputs_of_the_pair(monkeypatch):
    model, inputs = mlp(), BATCH[0].clone().requires_grad_()
    pair, criterion = DataParallelModel(model, VIRTUAL), DataParallelCriterion(CRITERION, VIRTUAL)
    with guarded(monkeypatch, model) as memories:
        criterion(pair(inputs), BATCH[1]).backward()
        assert memories.owner(inputs.grad) in (None, MASTER, HOST)


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

    model, inputs = build(lambda: Returns(smuggle)), randn(4, FEATURES)
    inputs[:, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    with (
        ScatterOnceParallel(model, 1, VIRTUAL[:2], verify=False) as engine,  # a look would wait
        guarded(monkeypatch, model),
        pytest.raises(MixedMemories, match=r"aten.add.*on cpu:1 mixes tensors of") as caught,
    ):
        engine.forward_backward(inputs, randint(CLASSES, 4), CRITERION)
    assert caught.value.__notes__[0].startswith(beginning_of_note(1, "cpu:1", 0, of=1))
