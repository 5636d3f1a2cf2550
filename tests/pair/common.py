"""What a user writes with the pair, beside the same in plain torch on one device."""

from __future__ import annotations

import copy

from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    call,
    gradients,
    whole_batch,
)
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel


class Plain:
    """A model and a criterion on one device."""

    def __init__(self, module, criterion):
        self.module = self.model = module
        self.criterion = criterion

    def loss(self, inputs, targets):
        return self.criterion(self.model(inputs), targets)


class Pair:
    """A model and a criterion that stay together for some steps."""

    def __init__(self, module, criterion, device_ids):
        self.module, self.plain_criterion = module, criterion
        self.model = DataParallelModel(module, device_ids)
        self.criterion = DataParallelCriterion(criterion, device_ids)

    def loss(self, inputs, targets, **options):
        outputs = call(self.model, inputs)
        assert type(outputs) is tuple
        return self.criterion(outputs, targets, **options)

    def check(self, inputs, targets):
        """One step gives the whole batch's loss and gradients; the loss is returned."""
        batch = copy.deepcopy((inputs, targets))
        expected_loss, expected = whole_batch(self.module, *batch, self.plain_criterion)
        self.module.zero_grad()
        loss = self.loss(inputs, targets)
        loss.backward()
        assert_close(loss.detach(), expected_loss, "loss")
        assert_gradients(self.module, expected)
        return loss.detach()


def assert_alike(make, program, device_ids, criterion=None):
    """``program(pair)`` gives what ``program(plain)`` does: the tensors it returns, and
    gradients.

    ``criterion`` makes the criterion; else that is a cross entropy.
    """
    criterion = criterion or nn.CrossEntropyLoss
    pair, plain = (
        Pair(build(make), criterion(), device_ids),
        Plain(build(make), criterion()),
    )
    found, expected = (program(one) or () for one in (pair, plain))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(ours.detach(), theirs.detach(), f"tensor {number}")
    assert_gradients(pair.module, gradients(plain.module))
    return pair
