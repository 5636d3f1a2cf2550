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


def plain(module: Any, inputs: Any, targets: Any, criterion: Any) -> tuple[Tensor, Gradients]:
    """Loss and gradients of one device, for a criterion that is a module too."""
    module = copy.deepcopy(module)
    module.zero_grad()
    inputs, targets = copy.deepcopy((inputs, targets))
    loss = criterion(call(module, inputs), targets)
    loss.backward()
    return loss.detach(), gradients(module)


class Pair:
    """A model and a criterion that stay together for some steps."""

    def __init__(self, module: Any, criterion: Any, device_ids: list[str]) -> None:
        self.module, self.plain_criterion = module, criterion
        self.model = DataParallelModel(module, device_ids)
        self.criterion = DataParallelCriterion(criterion, device_ids)

    def loss(self, inputs: Any, targets: Any, **options: Any) -> Tensor:
        outputs = call(self.model, inputs)
        assert type(outputs) is tuple
        return self.criterion(outputs, targets, **options)

    def check(
        self,
        inputs: Any,
        targets: Any,
        *,
        oracle: Any = None,
        relative: float = RELATIVE,
        **options: Any,
    ) -> Tensor:
        """One step gives the whole batch's loss and gradients; the loss is returned."""
        expected_loss, expected = plain(
            self.module, inputs, targets, oracle or self.plain_criterion
        )
        self.module.zero_grad()
        loss = self.loss(inputs, targets, **options)
        loss.backward()
        assert_close(loss.detach(), expected_loss, "loss", relative)
        assert_gradients(self.module, expected, relative)
        return loss.detach()


def assert_pair(
    module: Any, inputs: Any, targets: Any, criterion: Any, device_ids: list[str], **options: Any
) -> Tensor:
    """One step of a pair is the whole batch's on one device."""
    return Pair(module, criterion, device_ids).check(inputs, targets, **options)


def same_bits(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name])  # type: ignore[arg-type]
        for name in one
    )
