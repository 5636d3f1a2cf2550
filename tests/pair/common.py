"""What a user writes with the pair, beside the same in plain torch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from harness.oracle import (
    RELATIVE,
    assert_close,
    assert_gradients,
    build,
    call,
    gradients,
    whole_batch,
)
from torch import Tensor, nn

from scatterpar import DataParallelCriterion, DataParallelModel, gather


class Shared:
    """A list that the replicas share, as in any object that nobody can look into."""

    def __init__(self) -> None:
        self.found: list[Any] = []


class Plain:
    """A model and a criterion on one device."""

    def __init__(self, module: Any, criterion: Any) -> None:
        self.module = self.model = module
        self.criterion = criterion

    def loss(self, inputs: Any, targets: Any) -> Tensor:
        return self.criterion(call(self.model, inputs), targets)

    def outputs(self, inputs: Any) -> Any:
        return call(self.model, inputs)


class Pair:
    """A model and a criterion that stay together for some steps."""

    def __init__(self, module: Any, criterion: Any, device_ids: list[str]) -> None:
        self.module, self.plain_criterion = module, criterion
        self.model = DataParallelModel(module, device_ids)
        self.criterion = DataParallelCriterion(criterion, device_ids)

    def outputs(self, inputs: Any) -> Any:
        return gather(call(self.model, inputs), "cpu")

    def loss(self, inputs: Any, targets: Any, **options: Any) -> Tensor:
        outputs = call(self.model, inputs)
        assert type(outputs) is tuple
        return self.criterion(outputs, targets, **options)

    def check(
        self,
        inputs: Any,
        targets: Any,
        *,
        plain: tuple[Any, Any] | None = None,
        relative: float = RELATIVE,
        **options: Any,
    ) -> Tensor:
        """One step gives the whole batch's loss and gradients; the loss is returned.

        ``plain``: inputs and targets as plain torch takes them, where the pair's have markers.
        """
        plain = plain or copy.deepcopy((inputs, targets))
        expected_loss, expected = whole_batch(self.module, *plain, self.plain_criterion)
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


def assert_alike(
    make: Callable[[], Any],
    program: Callable[[Any], Any],
    device_ids: list[str],
    criterion: Any = None,
) -> Pair:
    """``program(pair)`` gives what ``program(plain)`` does: the tensors it returns, and gradients.

    ``criterion`` makes the criterion; else that is a cross entropy.
    """
    criterion = criterion or nn.CrossEntropyLoss
    pair, plain = Pair(build(make), criterion(), device_ids), Plain(build(make), criterion())
    found, expected = (program(one) or () for one in (pair, plain))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(ours.detach(), theirs.detach(), f"tensor {number}")
    assert_gradients(pair.module, gradients(plain.module))
    return pair
