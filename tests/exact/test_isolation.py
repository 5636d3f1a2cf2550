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
from harness.contrastive import clip, two_views
from harness.isolation import MixedMemories, guarded
from harness.models import CLASSES, FEATURES, Returns, mlp
from harness.module_cases import CASES, MODELS, Head
from harness.notes import beginning_of_note
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
    whole_batch,
)
from harness.weighted import CASES as LOSSES
from pair.common import Pair
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

VIRTUAL = [f"cpu:{i}" for i in range(4)]
MASTER = torch.device("cpu:0")
BATCH = randn(9, FEATURES), randint(CLASSES, 9)
by_both = pytest.mark.parametrize("runner", ["engine", "pair"])


def check(
    monkeypatch, runner, model, inputs, targets, criterion, *, accum=2, ids=VIRTUAL, **options
):
    twin = copy.deepcopy(criterion)
    heads = [getattr(one, "__self__", one) for one in (criterion, twin)]
    expected_loss, expected = whole_batch(model, copy.deepcopy(inputs), targets, twin)
    modules = [model, *([heads[0]] if isinstance(heads[0], nn.Module) else [])]
    devices = [torch.device(device) for device in ids]
    with ScatterOnceParallel(model, accum, ids) as engine, guarded(monkeypatch, *modules) as found:
        pair = Pair(model, criterion, ids)
        for _ in range(2):
            for module in modules:
                module.zero_grad()
            if runner == "engine":
                loss = engine.forward_backward(inputs, targets, criterion, **options)
            else:
                outputs = pair.model(inputs)
                assert [found.owner(output) for output in outputs] == devices
                loss = pair.criterion(outputs, targets, **options)
                loss.backward()
        assert found.owner(loss) == MASTER
        given = [p.grad for p in model.parameters() if p.grad is not None]
        assert {found.owner(gradient) for gradient in given} == {MASTER}
    assert_close(loss.detach(), expected_loss, "loss")
    assert_gradients(model, expected)
    if len(modules) == 2:
        assert_gradients(heads[0], gradients(heads[1]))
    assert set(found.checked) == set(devices)


KINDS = [*MODELS, "checkpointing", "checkpointing, reentrant", "sparse gradients"]
KINDS.remove("weight norm, old")


@by_both
@pytest.mark.parametrize("name", KINDS)
def test_models(monkeypatch, name, runner):
    check(monkeypatch, runner, CASES[name].build(), *CASES[name].batch, nn.CrossEntropyLoss())


@by_both
@pytest.mark.parametrize("case", [name for name in LOSSES if "weights" in name])
def test_losses(monkeypatch, case, runner):
    """Class weights, too, lie on the master, and every replica needs them in its own memory."""
    criterion = LOSSES[case].criterion()
    check(monkeypatch, runner, mlp(), BATCH[0], LOSSES[case].targets(9), criterion, accum=3)


@by_both
def test_replicas_that_share_some_memories(monkeypatch, runner):
    ids = ["cpu:0", "cpu:2", "cpu:2", "cpu:0"]
    check(monkeypatch, runner, mlp(), *BATCH, nn.CrossEntropyLoss(), accum=1, ids=ids)


def test_count_works_where_its_share_is(monkeypatch):
    def count(output, targets):
        return (output.argmax(1) * 0 + (targets >= 0)).sum()

    check(monkeypatch, "pair", mlp(), *BATCH, nn.functional.cross_entropy, count=count)


@by_both
@pytest.mark.parametrize("bound", [False, True])
def test_parameters_of_the_criterion(monkeypatch, bound, runner):
    head = Head()
    check(monkeypatch, runner, mlp(), *BATCH, head.forward if bound else head)


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
    with (
        ScatterOnceParallel(model, 2, VIRTUAL) as engine,
        guarded(monkeypatch, model) as memories,
    ):
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


@pytest.mark.parametrize("accum", [1, 3])
def test_a_criterion_of_the_whole_batch(monkeypatch, accum):
    batch = (randn(11, 5, seed=3), randn(11, 5, seed=4)), torch.arange(11)
    check(monkeypatch, "engine", two_views(), *batch, clip, accum=accum, whole_batch=True)
