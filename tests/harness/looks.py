"""Programs for the tests of looks, in a few lines each, and what a step
says of them.
"""

import warnings

from torch import nn
from torch.nn import functional as F

from harness.agree import Case
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import randint, randn, seeded
from harness.weighted import classes

ROWS, LENGTH = 24, 5
INPUTS, VALUES, LABELS = (
    randn(ROWS, FEATURES),
    randn(ROWS, CLASSES),
    randint(CLASSES, ROWS),
)
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
    return lambda: Net(function, *(make() for make in makers), **attributes)


def loss_of(criterion, targets=classes, *, model=mlp, accum=3, **options):
    """A case of this criterion, the same one for every module."""
    batch = INPUTS, targets(ROWS) if callable(targets) else targets
    return Case(model, batch, lambda _: criterion, accum=accum, options=options)


def case_of(model, inputs=INPUTS, targets=VALUES, accum=2, engine=None, **how):
    """A case of a module, with the mean of squares unless ``how`` has another
    criterion.
    """
    criterion = how.pop("criterion", F.mse_loss)
    batch, more = (inputs, targets), {"engine": engine or {}, "options": how}
    return Case(model, batch, lambda _: criterion, accum=accum, **more)


def own_loss(model, inputs, accum=3, **options):
    """A case of a module that computes its loss."""
    return Case(model, (inputs, None), lambda _: None, accum=accum, options=options)


def train(engine, case, batch=None):
    """A step, on the case's batch or another one."""
    criterion = case.criterion(engine.module)
    return engine.forward_backward(*(batch or case.batch), criterion, **case.options)


def step(engine, criterion, targets, inputs=INPUTS, **options):
    return engine.forward_backward(inputs, targets, criterion, **options)


def said(engine, case, steps):
    """The texts of all warnings in some steps."""
    criterion = case.criterion(engine.module)
    with warnings.catch_warnings(record=True) as caught, seeded(0):
        warnings.simplefilter("always")
        for _ in range(steps):
            engine.forward_backward(*case.batch, criterion, **case.options)
    return [str(each.message) for each in caught]


class Calls:
    """Counts where a look does not restore it: in a class of this harness."""

    number = 0


def counted(criterion):
    def calls(output, targets):
        Calls.number += 1
        return criterion(output, targets)

    return calls


def assert_agreed(engine, step, looks=True):
    """The first of two steps has a look (more calls), which agrees; without ``looks``
    neither.
    """

    def note(*_):
        Calls.number += 1

    numbers = []
    handle = engine.module.register_forward_pre_hook(note)
    for _ in range(2):
        Calls.number = 0
        step()
        numbers.append(Calls.number)
    handle.remove()
    sub_steps = len(engine.last_step.plan.substep_rows)
    assert looks or numbers[1] == sub_steps
    assert (numbers[0] > sub_steps) == looks


def in_a_def(output, targets):
    return F.cross_entropy(output, targets)


def squares(output, targets):
    return (output - targets).square().sum()
