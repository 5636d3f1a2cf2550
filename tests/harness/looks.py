"""Programs for the tests of looks, in a few lines each, and what a step
says of them.
"""

import sys
import warnings
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from harness.agree import Case
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import randint, randn, seeded
from harness.weighted import classes

ROWS = 24
LENGTH = 5
INPUTS = randn(ROWS, FEATURES)
VALUES = randn(ROWS, CLASSES)
LABELS = randint(CLASSES, ROWS)
SEQUENCES = randn(ROWS, LENGTH, FEATURES)


class Net(Of):
    """Calls ``function(net, *inputs)``; has a linear layer, dropout, ``parts``, and
    attributes.
    """

    def __init__(self, function, *parts, **attributes):
        layers = {"linear": nn.Linear(FEATURES, CLASSES), "drop": nn.Dropout(0.3)}
        super().__init__(function, **layers, parts=nn.ModuleList(parts), **attributes)


def net(function, *makers, **attributes):
    """Makes a ``Net`` whose parts the ``makers`` make."""

    def make():
        parts = [make_part() for make_part in makers]
        return Net(function, *parts, **attributes)

    return make


def loss_of(criterion, targets=classes, *, model=mlp, accum=3, **options):
    """A case of this criterion, the same one for every module."""
    if callable(targets):
        targets = targets(ROWS)
    batch = INPUTS, targets
    return Case(model, batch, lambda _: criterion, accum=accum, options=options)


def case_of(
    model,
    inputs=INPUTS,
    targets=VALUES,
    accum=2,
    engine=None,
    criterion=F.mse_loss,
    **options,
):
    """A case of a module, with the mean of squares unless there is another
    criterion.
    """
    return Case(
        model,
        (inputs, targets),
        lambda _: criterion,
        accum=accum,
        engine=engine or {},
        options=options,
    )


def own_loss(model, inputs, accum=3, **options):
    """A case of a module that computes its loss."""
    batch = inputs, None
    return Case(model, batch, lambda _: None, accum=accum, options=options)


def train(engine, case, batch=None):
    """A step, on the case's batch or another one."""
    criterion = case.criterion(engine.module)
    inputs, targets = batch or case.batch
    return engine.forward_backward(inputs, targets, criterion, **case.options)


def step(engine, criterion, targets, inputs=INPUTS, **options):
    return engine.forward_backward(inputs, targets, criterion, **options)


def said(engine, case, steps):
    """The texts of all warnings in some steps."""
    criterion = case.criterion(engine.module)
    with warnings.catch_warnings(record=True) as caught, seeded(0):
        warnings.simplefilter("always")
        for _ in range(steps):
            engine.forward_backward(*case.batch, criterion, **case.options)
    return [str(warning.message) for warning in caught]


class Calls:
    """What calls note, those of looks, too: their number, and what they were given."""

    number = 0
    sizes: ClassVar[set] = set()
    seen: ClassVar[list] = []


def calls():
    """``Calls``, found by a text: a look restores classes that functions name."""
    return getattr(sys.modules[__name__], "Calls")  # noqa: B009


def counted(criterion):
    def calling(output, targets):
        calls().number += 1
        return criterion(output, targets)

    return calling


def assert_agreed(engine, step, looks=True):
    """The first of two steps has a look (more calls), which agrees; without ``looks``
    neither.
    """

    def note(*_):
        calls().number += 1

    numbers = []
    handle = engine.module.register_forward_pre_hook(note)
    for _ in range(2):
        calls().number = 0
        step()
        numbers.append(calls().number)
    handle.remove()
    first, second = numbers
    sub_steps = len(engine.last_step.plan.substep_rows)
    assert looks or second == sub_steps
    assert (first > sub_steps) == looks


class WithBalance(torch.autograd.Function):
    """The output as it is; the balance loss gets a gradient of one, as in models of
    experts.
    """

    @staticmethod
    def forward(ctx, output, balance):
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones(())


def balancing(balance):
    """A forward pass that injects the gradient of ``balance(gates)``."""

    def forward(net, rows):
        gates = net.linear(rows).softmax(-1)
        return WithBalance.apply(gates, balance(gates))

    return forward


def in_a_def(output, targets):
    return F.cross_entropy(output, targets)


def squares(output, targets):
    difference = output - targets
    return difference.square().sum()
