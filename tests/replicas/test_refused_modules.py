"""Modules that replicas cannot copy are refused by name, with what to call."""

from __future__ import annotations

import pytest
import torch
from harness.models import linear
from torch import nn

from scatterpar.replicas.refused_modules import check_placement, parameters_of

pytestmark = pytest.mark.core

CPU = [torch.device("cpu")]


def with_buffer(buffer):
    model = linear()
    model.register_buffer("table", buffer)
    return model


REFUSED = {
    "meta": (
        lambda: linear().to("meta"),
        ValueError,
        r"'weight' is on meta, without values; call .to_empty\(device='cpu'\)",
    ),
    "lazy": (lambda: nn.LazyLinear(3), RuntimeError, "lazy parameter, 'weight'"),
    "sparse": (lambda: with_buffer(torch.eye(3).to_sparse()), TypeError, "sparse"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_module_refused_by_name(kind):
    make, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        check_placement(make(), CPU)


def test_plain_modules_and_functions_pass():
    check_placement(with_buffer(torch.ones(3)), CPU)
    check_placement(nn.LazyLinear(3), CPU, lazy=True)
    check_placement(print, CPU)
    assert [name for name, _ in parameters_of(linear())] == ["weight", "bias"]
    assert list(parameters_of(print)) == []
