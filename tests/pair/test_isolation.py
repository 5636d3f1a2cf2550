"""On virtual devices, no operation mixes tensors of two memories, in backward neither.

Replicas run in workers of their own, but ``backward()`` is the user's and runs in the
caller's thread: there each operation must be in one memory too, and the gradient must cross
where the parameters crossed.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from helpers.isolation import MixedMemories, guarded
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, assert_gradients, build, randint, randn, whole_batch
from helpers.weighted import CASES as LOSSES
from helpers.zoo import CASES, MODELS
from torch import nn

from pair.common import Pair
from scatterpar import DataParallelCriterion, DataParallelModel

VIRTUAL = [f"cpu:{i}" for i in range(4)]
BATCH = randn(9, FEATURES), randint(CLASSES, 9)


@contextlib.contextmanager
def apart(monkeypatch, *modules):
    """The guard, with the parameters' gradients on the master."""
    with guarded(monkeypatch, *modules) as memories:
        yield memories
        for module in modules:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    assert memories.owner(parameter.grad) == torch.device("cpu:0")


def check(monkeypatch, model, inputs, targets, criterion, device_ids=VIRTUAL, **options):
    expected_loss, expected = whole_batch(model, inputs.clone(), targets, criterion)
    pair = Pair(model, criterion, device_ids)
    modules = [model, *([criterion] if isinstance(criterion, nn.Module) else [])]
    with apart(monkeypatch, *modules) as memories:
        for _ in range(2):
            model.zero_grad()
            outputs = pair.model(inputs)
            assert [memories.owner(output) for output in outputs] == [
                torch.device(device) for device in device_ids
            ]
            loss = pair.criterion(outputs, targets, **options)
            assert memories.owner(loss) == torch.device("cpu:0"), "the loss is on the master"
            loss.backward()
    assert_close(loss.detach(), expected_loss, "loss")
    assert_gradients(model, expected)
    assert set(memories.checked) == {torch.device(device) for device in device_ids}


KINDS = {*MODELS, "checkpointing", "checkpointing, reentrant", "sparse gradients"}


@pytest.mark.parametrize("name", sorted(KINDS - {"weight norm, old"}))
def test_models(monkeypatch, name):
    check(monkeypatch, CASES[name].build(), *CASES[name].batch, nn.CrossEntropyLoss())


@pytest.mark.parametrize("case", LOSSES)
def test_losses(monkeypatch, case):
    check(monkeypatch, mlp(), BATCH[0], LOSSES[case].targets(9), LOSSES[case].criterion())


def test_replicas_that_share_some_memories(monkeypatch):
    devices = ["cpu:0", "cpu:2", "cpu:2", "cpu:0"]
    check(monkeypatch, mlp(), *BATCH, nn.CrossEntropyLoss(), devices)


def test_count_works_where_its_share_is(monkeypatch):
    def count(output, targets):
        return (output.argmax(1) * 0 + (targets >= 0)).sum()

    check(monkeypatch, mlp(), *BATCH, nn.functional.cross_entropy, count=count)


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(CLASSES, 1))
        self.register_buffer("offset", randn(1))

    def forward(self, output, targets):
        return (output @ self.weight + self.offset - targets).square().mean()


@pytest.mark.parametrize("bound", [False, True])
def test_parameters_of_the_criterion(monkeypatch, bound):
    module = Projected()
    criterion = module.forward if bound else module
    pair, twin = Pair(mlp(), criterion, VIRTUAL), copy.deepcopy(module)
    targets = randn(9, 1)
    twin(mlp()(BATCH[0]), targets).backward()
    with apart(monkeypatch, pair.module, module):
        pair.loss(BATCH[0], targets).backward()
    assert_close(module.weight.grad, twin.weight.grad, "weight")


def test_batch_statistics(monkeypatch):
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6)))
    twin = copy.deepcopy(model)
    twin(BATCH[0][:3])
    pair = DataParallelModel(model, VIRTUAL)
    with apart(monkeypatch, model) as memories:
        sum_on_master(pair(BATCH[0])).backward()
        assert memories.owner(model[1].running_mean) == torch.device("cpu:0")
    assert_close(model[1].running_mean, twin[1].running_mean, "mean")


def sum_on_master(outputs):
    criterion = DataParallelCriterion(lambda o, t: o.square().sum(), VIRTUAL)
    return criterion(outputs, torch.zeros(9), reduction="sum")


def test_the_gradient_of_the_inputs_comes_back(monkeypatch):
    model, twin = mlp(), mlp()
    inputs, same = (BATCH[0].clone().requires_grad_() for _ in range(2))
    twin(same).square().sum().backward()
    pair = DataParallelModel(model, VIRTUAL)
    with apart(monkeypatch, model) as memories:
        sum_on_master(pair(inputs)).backward()
        assert memories.owner(inputs.grad) in (None, torch.device("cpu:0"), torch.device("cpu"))
    assert_close(inputs.grad, same.grad, "inputs")


def test_the_guard_can_fail(monkeypatch):
    """A criterion without ``device_ids`` takes virtual devices for one: targets do not cross."""
    pair = DataParallelModel(mlp(), VIRTUAL)
    targets = BATCH[1].clone()
    with apart(monkeypatch, pair.module) as memories:
        memories.claim(targets, torch.device("cpu:0"))
        outputs = pair(BATCH[0])
        with pytest.raises(MixedMemories):
            DataParallelCriterion(nn.CrossEntropyLoss())(outputs, targets)
