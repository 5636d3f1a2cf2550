"""What each tensor of a module is to its replicas: number, kind, dtype of its sum."""

from __future__ import annotations

import pytest
import torch
from harness.models import linear
from harness.oracle import randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.replicas.slots import Slots

pytestmark = pytest.mark.core
WIDER = torch.float64


def of_each_kind():
    net = nn.Module()
    net.trained = nn.Parameter(torch.ones(2))
    net.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    net.register_buffer("buffer", torch.ones(2))
    net.computed = net.trained * 2
    with torch.inference_mode():
        net.inferred = torch.ones(2, requires_grad=True)
    return net


@pytest.mark.parametrize(
    ("name", "is_parameter", "is_leaf", "sum_dtype"),
    [
        ("trained", True, True, WIDER),
        ("frozen", True, True, None),
        ("buffer", False, True, None),
        ("computed", False, False, WIDER),
        ("inferred", False, True, None),
    ],
)
def test_slot_of_each_kind(name, is_parameter, is_leaf, sum_dtype):
    net = of_each_kind()
    contents = ModuleContents((net,))
    tensor = getattr(net, name)
    (slot,) = [s for s in Slots(contents, WIDER).all if s.tensor is tensor]
    assert list(contents.tensors)[slot.number] == id(tensor)
    facts = (slot.is_parameter, slot.is_leaf, slot.sum_dtype)
    assert facts == (is_parameter, is_leaf, sum_dtype)
    assert slot.is_trained == (sum_dtype is not None)


def test_number_is_that_of_the_copies(devices):
    net = linear()
    with ScatterOnceParallel(net, 1, devices(2)) as engine:
        engine.forward_backward(randn(4, net.in_features), None, lambda y, _: y.mean())
        replica_set = engine._replicas.of_model
        for slot in replica_set.slots.all:
            for replica in replica_set.replicas:
                assert torch.equal(replica.tensors[slot.number], slot.tensor)
                assert replica.tensors[slot.number].requires_grad == slot.is_trained
