"""What a step says of a program: refused, told, or silent because it is right.

Each case is a program that somebody wrote, or that our own advice leads to.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES
from harness.oracle import build, randint, randn, seeded
from torch import nn
from torch.nn import functional as F

import scatterpar
from scatterpar import ScatterOnceParallel
from scatterpar.verify import fits

ROWS = 24
INPUTS, VALUES, LABELS = randn(ROWS, FEATURES), randn(ROWS, CLASSES), randint(CLASSES, ROWS)


class Net(nn.Module):
    """Calls ``function(net, rows)``; has a linear layer, dropout, and more."""

    def __init__(self, function, *parts):
        super().__init__()
        self.linear, self.drop = nn.Linear(FEATURES, CLASSES), nn.Dropout(0.3)
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def plain():
    return Net(lambda net, rows: net.linear(rows))


def steps_of(engine, steps, *batch, **options):
    """The texts of all warnings in some steps."""
    with warnings.catch_warnings(record=True) as caught, seeded(0):
        warnings.simplefilter("always")
        for _ in range(steps):
            engine.forward_backward(*batch, **options)
    return [str(each.message) for each in caught]


# --- numbers and ratios that forward computes from its micro-batch, with whole_batch ---


def with_balance(net, rows):
    """The load balance of a mixture of experts, which compares the rows of the micro-batch."""
    gates = net.linear(net.drop(rows)).softmax(-1)
    return gates, (gates.mean(0) ** 2).sum()


def of_sum(net, rows):
    """Rows over the sum of the micro-batch, as the duration loss of a speech model has them."""
    output = net.linear(rows + 0.1 * torch.randn_like(rows)).square()
    return output / output.sum()


@pytest.mark.draws
@pytest.mark.parametrize("accum", [1, 3])
def test_a_number_that_forward_computes_from_its_rows_is_refused(devices, accum):
    """The advice ``whole_batch=True`` led to a gradient that was 140 % off."""
    model = build(lambda: Net(with_balance))
    with ScatterOnceParallel(model, accum, devices(2), verify=False) as engine:
        words = r"a number .*one entry per row.*in the criterion"
        with nothing_changes(model), pytest.raises(ValueError, match=words):
            engine.forward_backward(
                INPUTS, VALUES, lambda o, t: F.mse_loss(o[0], t) + o[1], whole_batch=True
            )


@pytest.mark.draws
@pytest.mark.filterwarnings("error")
def test_a_number_that_no_loss_reads_may_differ(devices):
    """A mixture that returns its auxiliary loss was told of it, although nobody read it."""
    with ScatterOnceParallel(build(lambda: Net(with_balance)), 3, devices(2)) as engine:
        for _ in range(9):
            engine.forward_backward(
                INPUTS, VALUES, lambda o, t: F.mse_loss(o[0], t), whole_batch=True
            )


@pytest.mark.draws
def test_rows_over_a_sum_of_the_micro_batch_are_not_silent(devices):
    """Random numbers hid it: the gradient was 160 to 200 % off."""
    with ScatterOnceParallel(build(lambda: Net(of_sum)), 3, devices(2)) as engine:
        try:
            said = steps_of(engine, 9, INPUTS, None, lambda o, _: o.log().sum(), whole_batch=True)
        except ValueError as error:
            said = [str(error)]
        assert len([text for text in said if "rows" in text]) == 1


# --- attributes that forward leaves on the module ---


def leaving(value_of):
    def forward(net, rows):
        net.kept = value_of(net.linear(rows).square().mean())
        return net.linear(rows)

    return forward


LEFT = {
    "instead of None": (lambda aux: aux, None, lambda kept: kept),
    "in a list": (lambda aux: [aux], [], lambda kept: kept[0]),
    "in a dict": (lambda aux: {"aux": aux}, {}, lambda kept: kept["aux"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_an_attribute_that_is_empty_on_the_users_module_is_refused(devices, name):
    """The error was ``'int' and 'NoneType'``, or an IndexError."""
    value_of, empty, read = LEFT[name]
    model = build(lambda: Net(leaving(value_of)))
    model.kept = empty
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.raises(ValueError, match=r"leads to the module.*plain torch.*on a replica"),
    ):
        engine.forward_backward(
            INPUTS, LABELS, lambda o, t: F.cross_entropy(o, t) + read(model.kept)
        )


@pytest.mark.filterwarnings("error", "ignore:.*weight_norm")
@pytest.mark.parametrize("accum", [1, 3])
def test_frozen_layers_with_weight_norm_keep_no_state(devices, accum):
    """Each pass computes their weight again: an equal tensor, which was told to move."""

    def make():
        frozen = torch.nn.utils.weight_norm(nn.Linear(FEATURES, FEATURES)).requires_grad_(False)
        return Net(lambda net, rows: net.linear(net.parts[0](rows)), frozen)

    model = build(make)
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        for _ in range(3):
            engine.forward_backward(INPUTS, VALUES, nn.MSELoss())


# --- numbers of the criterion ---


class Loop:
    """The user's own training loop: its method is the criterion, and it holds the engine."""

    def __init__(self, engine):
        self.engine, self.weight = engine, 0.0

    def loss(self, output, targets):
        loss = F.mse_loss(output, targets)
        return loss + self.weight * output.std(0).sum() if self.weight else loss


def test_a_number_that_changes_is_seen_beside_an_engine_in_the_same_object(devices):
    """The engine's own counters moved in every step, so it was refused at step 31."""
    with ScatterOnceParallel(build(plain), 2, devices(2)) as engine:
        loop = Loop(engine)
        for _ in range(19):
            engine.forward_backward(INPUTS, VALUES, loop.loss)
        loop.weight = 0.5
        with pytest.raises(ValueError, match="whole_batch=True"):
            engine.forward_backward(INPUTS, VALUES, loop.loss)


# --- what the pages advise ---


def test_an_adaptive_weight_is_exact_by_two_losses_of_the_engine(devices):
    """As VQGAN weighs its adversarial loss: by gradients of the whole batch at the last layer."""

    def second(output, targets):
        return F.smooth_l1_loss(output, targets)

    def weighted(losses, parameters):
        one, other = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
        weight = one[0].norm() / other[0].norm()
        return [a + weight * b for a, b in zip(one, other, strict=True)]

    model = build(plain)
    parameters, criteria = [*model.parameters()], (F.mse_loss, second)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        found = weighted([engine.loss(INPUTS, VALUES, each) for each in criteria], parameters)
    expected = weighted([each(model(INPUTS), VALUES) for each in criteria], parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# --- which reduction= and count= fit ---


def ignoring(output, targets):
    return F.cross_entropy(output, targets, ignore_index=0)


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


COUNT = scatterpar.count_labels(0)
FITTING = [
    (ignoring, {"count": COUNT}, True),
    (ignoring, {"reduction": "mean"}, False),
    (ignoring, {"reduction": "sum"}, False),
    (summed, {"reduction": "sum"}, True),
    (summed, {"count": COUNT}, False),
]


@pytest.mark.parametrize(("criterion", "options", "expected"), FITTING)
@pytest.mark.parametrize("in_module", [False, True])
def test_which_reduction_and_count_fit_a_few_rows(devices, criterion, options, expected, in_module):
    if in_module:
        model = build(lambda: Net(lambda net, rows, labels: criterion(net.linear(rows), labels)))
        batch, count = ((INPUTS, LABELS),), options.get("count")
        options = options | ({"count": lambda inputs, _: count(None, inputs[1])} if count else {})
    else:
        model, batch = (
            build(plain),
            (INPUTS, LABELS, criterion),
        )
    with ScatterOnceParallel(model, 2, devices(2)) as engine, nothing_changes(model):
        assert fits(engine, *batch, **options) is expected


def test_nothing_fits_if_rows_are_compared(devices):
    with ScatterOnceParallel(build(plain), 2, devices(2)) as engine:
        for options in ({"reduction": "sum"}, {"reduction": "mean"}):
            assert not fits(engine, INPUTS, None, lambda o, _: o.std(0).sum(), **options)
