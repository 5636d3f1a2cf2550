"""Calls of the user's modules in backward passes of replicas that take turns."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import FEATURES
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel
from scatterpar.replicas.calls_in_backward import RoutedCall, backward_of

pytestmark = pytest.mark.draws


def replica_set_of(module):
    engine = ScatterOnceParallel(module, device_ids=["cpu"] * 2)
    assert len(engine.replicas) == 2
    return engine._replicas.of_model


def recomputed_loss(layer):
    return checkpoint(layer, torch.ones(2, FEATURES), use_reentrant=False).sum()


@pytest.mark.parametrize("is_present", [False, True])
def test_call_of_a_backward_pass_is_the_replicas(is_present):
    layer = nn.Linear(FEATURES, 1)
    replica_set = replica_set_of(layer)
    replica = replica_set.replicas[1]
    called = []
    replica.root.register_forward_pre_hook(lambda module, _: called.append(module))
    layer.register_forward_pre_hook(lambda module, _: called.append(module))
    calls = replica_set.calls_in_backward
    calls.begin()
    loss = recomputed_loss(layer)
    assert called == [layer]  # outside of a backward pass
    calls.present = replica if is_present else None
    with backward_of(replica, [loss]):
        loss.backward()
    calls.end()
    assert called[1] is (layer if is_present else replica.root)


def test_modules_are_called_as_before_at_the_end():
    layer = nn.Linear(FEATURES, 1)
    replica_set = replica_set_of(layer)
    names = {*vars(layer)}
    calls = replica_set.calls_in_backward
    for _ in range(2):
        calls.begin()
        assert isinstance(layer._compiled_call_impl, RoutedCall)
        assert copy.deepcopy(layer)._compiled_call_impl is None
    calls.end()
    assert {*vars(layer)} == names


def test_other_engine_of_the_module_has_plain_replicas():
    layer = nn.Linear(FEATURES, 1)
    calls = replica_set_of(layer).calls_in_backward
    calls.begin()
    other = replica_set_of(layer)
    calls.end()
    assert other.replicas[1].root._compiled_call_impl is None
    assert other.compiler is None


def test_compiled_modules_are_left_alone():
    layer = nn.Sequential(nn.Linear(FEATURES, 1))
    layer.compile(backend="eager")
    call = layer._compiled_call_impl
    calls = replica_set_of(layer).calls_in_backward
    calls.begin()
    assert layer._compiled_call_impl is call
    assert layer[0]._compiled_call_impl is None
    calls.end()
    assert layer._compiled_call_impl is call
