"""Parameters that a forward pass writes: as one device has them, or told."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.oracle import assert_close, build
from test_written_parameters import (
    BATCH,
    MODELS,
    Remembers,
    WritesLate,
    assert_untouched,
    clip,
    each_model,
    state,
)
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel


@each_model
def test_parameters_and_gradients_are_those_of_one_device(devices, case):
    """Rows that only one replica saw were renormalised on its device alone."""
    make, inputs = case
    model = build(make)
    plain = copy.deepcopy(model)
    pair = DataParallelModel(model, devices(3))
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    for _ in range(2):
        criterion(pair(inputs), BATCH[1]).backward()
        nn.functional.cross_entropy(plain(inputs), BATCH[1]).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(one.detach(), other.detach(), "parameter")
            if other.grad is not None:
                assert_close(one.grad.to_dense(), other.grad.to_dense(), "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["max_norm", "clip .data", "set_"])
def test_a_failed_call_leaves_them_as_they_were(devices, name):
    make, inputs = MODELS[name]
    model = build(make)
    fail = [False]

    def hook(*_):
        if fail[0]:
            raise ArithmeticError("boom")

    model.head.register_forward_hook(hook)
    pair = DataParallelModel(model, devices(2))
    for good in range(2):
        fail[0] = True
        before = state(model)
        with pytest.raises(ArithmeticError):
            pair(inputs)
        assert_untouched(model, before)
        fail[0] = False
        if not good:
            pair(inputs)


def test_what_depends_on_the_rows_is_refused_by_name(devices):
    model = build(Remembers)
    before = state(model)
    pair = DataParallelModel(model, devices(2))
    with pytest.raises(ValueError, match="parameter 'mean'"):
        pair(BATCH[0])
    assert_untouched(model, before)


def test_a_late_write_is_told(devices, monkeypatch):
    model = build(lambda: WritesLate(clip))
    pair = DataParallelModel(model, devices(2))
    pair(BATCH[0])
    monkeypatch.setattr(WritesLate, "on", True)
    with pytest.raises(RuntimeError, match=r"parameter 'head\.weight'"):
        pair(BATCH[0])
    pair(BATCH[0])
    assert model.head.weight.abs().max() == 0.2
