"""Tensors of a batch have the user's classes and attributes in every micro-batch."""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of
from harness.oracle import assert_close, build, randn
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar import (
    DataParallelModel,
    Replicated,
    Rows,
    ScatterOnceParallel,
)
from scatterpar.batch.classes import like

ROWS, VALUES = randn(9, FEATURES), randn(9, CLASSES)
COUNT = torch.tensor(2.0, dtype=torch.float64)


class Image(Tensor):
    """A class by which a module knows what a tensor is."""


class Mask(Tensor):
    """Operators return plain tensors, as for torchvision's classes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def of_class(kind, tensor, **attributes):
    value = tensor.clone().as_subclass(kind)
    vars(value).update(attributes)
    return value


def scaled(m, rows, *values):
    """Depends on the class and the attribute of everything that it gets."""
    factor = 1.0
    for value in (rows, *values):
        for tensor in value if isinstance(value, list) else [value]:
            factor += {Image: 2, Mask: 3}.get(type(tensor), 0)
            factor += getattr(tensor, "scale", 0.0)
    return m.linear(rows.as_subclass(Tensor)) * factor


def model():
    return build(lambda: Of(scaled, linear=nn.Linear(FEATURES, CLASSES)))


INPUTS = {
    "a class": lambda: of_class(Image, ROWS),
    "a class whose operators forget it": lambda: of_class(Mask, ROWS),
    "an attribute of a class": lambda: of_class(Image, ROWS, scale=0.5),
    "an attribute of a plain tensor": lambda: of_class(Tensor, ROWS, scale=0.5),
    "without rows": lambda: (ROWS, of_class(Mask, COUNT, scale=0.5)),
    "replicated": lambda: (ROWS, Replicated(of_class(Image, COUNT, scale=2.0))),
    "entries of rows": lambda: (
        ROWS,
        Rows([of_class(Mask, r, scale=1.0) for r in ROWS]),
    ),
}


def as_arguments(inputs):
    """What plain torch gets, of the first row's entries if there are several."""
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    return [getattr(value, "contents", value) for value in values]


@pytest.mark.parametrize("name", INPUTS)
def test_class_and_attributes_reach_module(devices, name):
    """They were lost on every layout, silently: 37 to 58 % off."""
    inputs = INPUTS[name]()
    if name == "entries of rows":  # each micro-batch has another number of them
        inputs = ROWS, Rows(inputs[1].entries, lambda few: few[0])
        plain = [ROWS, inputs[1].entries[0]]
    else:
        plain = as_arguments(inputs)
    net = model()
    expected = F.mse_loss(net(*plain), VALUES).detach()
    with ScatterOnceParallel(net, 2, devices(2)) as engine:
        for _ in range(2):
            loss = engine.forward_backward(inputs, VALUES, F.mse_loss)
            assert_close(loss, expected, "loss")
        outputs = engine.eval()(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    assert_close(outputs, net(*plain).detach(), "outputs")


def test_class_and_attributes_reach_module_of_the_pair(devices):
    net = model()
    outputs = DataParallelModel(net, devices(2))(of_class(Mask, ROWS, scale=0.5))
    joined = torch.cat([output.detach().cpu() for output in outputs])
    assert_close(joined, net(of_class(Mask, ROWS, scale=0.5)).detach(), "outputs")


@pytest.mark.parametrize("whole_batch", [False, True])
def test_class_and_attributes_reach_criterion(devices, whole_batch):
    def criterion(output, targets):
        return F.mse_loss(output, targets.as_subclass(Tensor)) * targets.scale

    net = model()
    targets = of_class(Image, VALUES, scale=3.0)
    expected = criterion(net(ROWS), targets).detach()
    with ScatterOnceParallel(net, 2, devices(2)) as engine:
        loss = engine.forward_backward(
            ROWS, targets, criterion, whole_batch=whole_batch
        )
    assert_close(loss, expected, "loss")


@pytest.mark.parametrize(
    "value", [torch.ones(9, 4), [f"{row}.png" for row in range(9)]]
)
def test_attribute_with_rows_refused(devices, value):
    """It would go whole to every micro-batch; beside the tensor it is divided."""
    inputs = of_class(Image, ROWS, boxes=value)
    with (
        ScatterOnceParallel(model(), 2, devices(2)) as engine,
        pytest.raises(ValueError, match="attribute 'boxes' that would go whole"),
    ):
        engine.forward_backward(inputs, VALUES, F.mse_loss)


def test_like_leaves_plain_tensors():
    result = ROWS[:2]
    assert like(ROWS, result) is result
    assert type(like(of_class(Image, ROWS), result)) is Image
    assert type(result) is Tensor
