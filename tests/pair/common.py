"""One step of the pair, and the plain step on one device that it must equal."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers.oracle import (
    RELATIVE,
    Gradients,
    assert_close,
    assert_gradients,
    call,
    gradients,
)
from torch import Tensor

from scatterpar import DataParallelCriterion, DataParallelModel


def apply(model: DataParallelModel, inputs: Any) -> tuple[Any, ...]:
    return call(model, inputs)


def plain(module: Any, inputs: Any, targets: Any, criterion: Any) -> tuple[Tensor, Gradients]:
    """Loss and gradients of one device, for a criterion that is a module too."""
    module = copy.deepcopy(module)
    module.zero_grad()
    inputs, targets = copy.deepcopy((inputs, targets))
    loss = criterion(call(module, inputs), targets)
    loss.backward()
    return loss.detach(), gradients(module)


def assert_pair(
    module: Any,
    inputs: Any,
    targets: Any,
    criterion: Any,
    device_ids: list[str],
    *,
    oracle: Any = None,
    relative: float = RELATIVE,
    **options: Any,
) -> Tensor:
    """One step of the pair gives the whole batch's loss and gradients; the loss is returned."""
    expected_loss, expected = plain(module, inputs, targets, oracle or criterion)
    module.zero_grad()
    outputs = apply(DataParallelModel(module, device_ids), inputs)
    assert type(outputs) is tuple
    loss = DataParallelCriterion(criterion, device_ids)(outputs, targets, **options)
    assert loss.shape == ()
    loss.backward()
    assert_close(loss.detach(), expected_loss, "loss", relative)
    assert_gradients(module, expected, relative)
    return loss.detach()


def same_bits(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name])  # type: ignore[arg-type]
        for name in one
    )
