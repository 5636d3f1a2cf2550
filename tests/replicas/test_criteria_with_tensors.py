"""Criteria that bring tensors along: what is bound in a partial follows to every device."""

from __future__ import annotations

import functools

import pytest
import torch
from harness.isolation import guarded
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_close, assert_step, randn, whole_batch
from harness.weighted import CLASS_WEIGHTS, classes
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

ROWS = 13
BATCH = randn(ROWS, FEATURES), classes(ROWS)


def weighted(output, targets, options, scale=1.0):
    losses = F.cross_entropy(output, targets, reduction="none")
    return (losses * options["weight"][:1]).mean() * scale


CRITERIA = {
    "class weights": functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS.clone()),
    "nested": functools.partial(
        functools.partial(weighted, options={"weight": CLASS_WEIGHTS.clone()}), scale=3.0
    ),
    "a module": functools.partial(nn.CrossEntropyLoss(CLASS_WEIGHTS.clone(), reduction="sum")),
    "a module's method": functools.partial(nn.MSELoss().forward),
}


@pytest.mark.parametrize("case", CRITERIA)
def test_tensors_in_a_partial_are_in_each_replica_s_memory(monkeypatch, case):
    """The second card failed: the weight stayed on the first."""
    model, criterion = mlp(), CRITERIA[case]
    batch = (BATCH[0], randn(ROWS, CLASSES)) if "method" in case else BATCH
    options = {"reduction": "sum"} if case == "a module" else {}
    expected, _ = whole_batch(model, *batch, criterion)
    module = criterion.func if isinstance(criterion.func, nn.Module) else nn.Module()
    with (
        ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1", "cpu:2"]) as engine,
        guarded(monkeypatch, model, module) as memories,
    ):
        memories.claim(list(criterion.keywords.values()), torch.device("cpu:0"))
        assert_close(engine.forward_backward(*batch, criterion, **options), expected, "loss")
        assert len(memories.checked) == 3


def test_they_are_sent_once_and_follow_what_is_written_into_them():
    weight = CLASS_WEIGHTS.clone()
    criterion = functools.partial(F.cross_entropy, weight=weight)
    with ScatterOnceParallel(mlp(), 2, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(*BATCH, F.cross_entropy)
        assert_step(engine, *BATCH, criterion)
        assert engine.last_step.bytes["replicate"] == weight.numel() * 8  # all else is there
        assert_step(engine, *BATCH, criterion)
        assert engine.last_step.bytes["replicate"] == 0
        weight[0] = 7.0
        assert_step(engine, *BATCH, criterion)


def test_a_bound_tensor_that_is_trained_gets_its_gradient(devices):
    def scaled(output, targets, scale):
        return (scale * F.cross_entropy(output, targets, reduction="none")).mean()

    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    twin = scale.detach().clone().requires_grad_()
    model = mlp()
    whole_batch(model, *BATCH, functools.partial(scaled, scale=twin))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, functools.partial(scaled, scale=scale))
    assert_close(scale.grad, twin.grad, "scale")


def test_what_a_closure_brings_along_is_named(devices):
    """It cannot be moved; so the error says what it is, where it is, and what to write instead."""
    weight = CLASS_WEIGHTS.to("meta")

    def criterion(output, targets):
        return F.cross_entropy(output, targets, weight=weight)

    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            engine.forward_backward(*BATCH, criterion)
        (said,) = [note for note in caught.value.__notes__ if "criterion uses" in note]
        for words in ("'weight' on meta", "computes on cpu", "functools.partial(criterion, weight"):
            assert words in said
        assert all(parameter.grad is None for parameter in engine.parameters())


def test_other_errors_of_criteria_say_nothing_of_it():
    weight = CLASS_WEIGHTS[:3]
    with ScatterOnceParallel(mlp(), 2, ["cpu"]) as engine, pytest.raises(RuntimeError) as caught:
        engine.forward_backward(*BATCH, lambda o, t: F.cross_entropy(o, t, weight=weight))
    assert not any("criterion uses" in note for note in caught.value.__notes__)


def test_the_pair_s_criterion_too(monkeypatch):
    model = mlp()
    weighted = functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS.clone())
    ids = ["cpu:0", "cpu:1"]
    expected, _ = whole_batch(model, *BATCH, weighted)
    with guarded(monkeypatch, model) as memories:
        memories.claim(weighted.keywords["weight"], torch.device("cpu:0"))
        outputs = DataParallelModel(model, ids)(BATCH[0])
        loss = DataParallelCriterion(weighted, ids)(outputs, BATCH[1])
        assert_close(loss.detach(), expected, "loss")
