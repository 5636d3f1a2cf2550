"""On virtual devices, no operation ever mixes tensors of two memories.

The engine's replicas run in workers of their own, and so do the pair's; but the pair's
``backward()`` is the user's and runs in the caller's thread: there each operation must be in one
memory too, and the gradient must cross where the parameters crossed. More cases: ``test_cases.py``.
"""

import pytest
import torch
from harness.isolation import HOST, guarded
from harness.models import CLASSES, FEATURES, mlp
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
