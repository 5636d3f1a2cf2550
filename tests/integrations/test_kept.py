"""Which values calls get copies of, and which attributes share objects."""

from __future__ import annotations

import enum
import threading
from types import SimpleNamespace

import pytest
import torch
from harness.models import Meter
from torch import nn

from scatterpar.integrations import kept

CPU = torch.device("cpu")


class Mode(enum.Enum):
    TRAIN = 1


SHARED = {
    "a lock's holder": SimpleNamespace(lock=threading.Lock()),
    "an enum": Mode.TRAIN,
    "an iterator": iter([1]),
    "a tensor that is trained": torch.ones(2, requires_grad=True),
    "a function": len,
}


@pytest.mark.parametrize("name", SHARED)
def test_other_objects_are_shared(name):
    assert kept.CallCopies(CPU).of(SHARED[name]) is SHARED[name]


def test_attributes_sharing_objects_grouped():
    values, meter, net = [1], Meter(), nn.Identity()
    attributes = {
        "values": values,
        "by_loader": [values],
        "meter": meter,
        "of_meter": meter.values,
        "net_and_list": [net, [2]],
        "number": 3,
        "other": [4],
    }
    changed = {"values", "of_meter", "net_and_list", "number"}
    assert kept.with_shared(attributes, changed) == {
        *("values", "by_loader", "meter", "of_meter", "number")
    }
