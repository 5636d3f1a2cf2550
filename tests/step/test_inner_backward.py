"""A backward pass inside forward or the criterion adds to replicas' gradients once per
micro-batch: it is refused if it reaches a parameter, and exact if it does not.

Both find no gradients of earlier sub-steps: one call for all rows would find none.
"""

from __future__ import annotations

import copy

import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_step, build, randint, randn
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.step.inner_backward import gradients_put_aside

pytestmark = pytest.mark.core

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()


def trains_an_auxiliary_head(m, inputs):
    m.aux(inputs).square().mean().backward()
    return m.linear(inputs)


def trains_if_a_row_says_so(m, inputs):
    """Not in the first sub-step, nor in a look at the first rows alone."""
    if torch.equal(inputs[-1], ROWS[-1]):
        m.aux(inputs).square().mean().backward()
    return m.linear(inputs) + 0 * m.aux(inputs).sum()


def writes_the_gradient(m, inputs):
    m.aux.bias.grad = torch.ones_like(m.aux.bias)
    return m.linear(inputs)


class Trained(nn.Module):
    """A criterion that trains a network of its own, in part at once."""

    def __init__(self):
        super().__init__()
        self.net = linear()

    def forward(self, output, targets):
        self.net(ROWS[:1]).square().mean().backward()
        return F.cross_entropy(output + self.net(ROWS[:1]), targets)


def regularises_at_once(output, targets):
    (0.1 * output.square().mean()).backward(retain_graph=True)
    return F.cross_entropy(output, targets)


FORWARDS = trains_an_auxiliary_head, trains_if_a_row_says_so, writes_the_gradient
CRITERIA = {"function": lambda: regularises_at_once, "module": Trained}


def model_with(forward):
    return build(
        lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES), aux=nn.Linear(5, 1))
    )


@pytest.mark.contract
@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("forward", FORWARDS)
def test_backward_in_forward_refused(devices, forward, whole_batch):
    model = model_with(forward)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    for accum, verify in ((1, True), (4, True), (4, False)):
        with (
            ScatterOnceParallel(model, accum, devices(2), verify=verify) as engine,
            nothing_changes(model),
            pytest.raises(
                ValueError, match=r"backward\(\).*'aux.*return the inner loss"
            ),
        ):
            engine.forward_backward(ROWS, LABELS, LOSS, whole_batch=whole_batch)


@pytest.mark.parametrize("kind", CRITERIA)
def test_backward_in_criterion_refused(devices, kind):
    model, criterion = linear(), CRITERIA[kind]()
    for accum, verify in ((1, True), (4, False)):
        with (
            ScatterOnceParallel(model, accum, devices(2), verify=verify) as engine,
            nothing_changes(model),
            pytest.raises(ValueError, match=r"backward\(\) inside"),
        ):
            engine.loss(ROWS, LABELS, criterion)


def test_late_backward_refused_in_its_step(devices):
    model = model_with(trains_an_auxiliary_head)
    model.function = lambda m, x: m.linear(x) + 0 * m.aux(x)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(3):
            assert_step(engine, ROWS, LABELS, LOSS)
        model.function = trains_an_auxiliary_head
        with pytest.raises(ValueError, match=r"backward\(\) inside"):
            engine.forward_backward(ROWS, LABELS, LOSS)


def trains_a_copy(m, inputs):
    """As meta-learning does: the copy's parameters are no replica's."""
    fast = copy.deepcopy(m.aux)
    fast(inputs).square().mean().backward()
    return m.linear(inputs) + m.aux(inputs)


def differentiates_by_its_inputs(m, inputs):
    inputs = inputs.detach().requires_grad_()
    m.aux(inputs).sum().backward(inputs=[inputs])
    return m.linear(inputs.grad)


@pytest.mark.parametrize("forward", [trains_a_copy, differentiates_by_its_inputs])
@pytest.mark.parametrize("whole_batch", [False, True])
def test_backward_to_no_parameter_is_exact(devices, forward, whole_batch):
    with ScatterOnceParallel(model_with(forward), 3, devices(2)) as engine:
        for _ in range(2):
            assert_step(engine, ROWS, LABELS, LOSS, whole_batch=whole_batch)


def test_whole_batch_criterion_may_backward(devices):
    """It runs once, so what it adds is what one device would add."""
    model = linear()
    expected = copy.deepcopy(model)
    regularises_at_once(expected(ROWS), LABELS).backward()
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        engine.forward_backward(ROWS, LABELS, regularises_at_once, whole_batch=True)
    torch.testing.assert_close(model.weight.grad, expected.weight.grad)


def adds_to_its_loss(net, output):
    """What a penalty of the gradient's size does, if there is one."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            output = output + (parameter.grad * parameter).sum()
    return output


def reads_gradients(m, inputs):
    return adds_to_its_loss(m, m.linear(inputs) + m.aux(inputs))


def clips_gradients(m, inputs):
    nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    return m.linear(inputs) + m.aux(inputs)


def drops_gradients(m, inputs):
    for parameter in m.parameters():
        parameter.grad = None
    return m.linear(inputs) + m.aux(inputs)


class ReadsItsOwn(nn.Module):
    """A criterion that reads the gradients of a network of its own."""

    def __init__(self):
        super().__init__()
        self.net = linear()

    def forward(self, output, targets):
        output = adds_to_its_loss(self.net, output + self.net(ROWS[:1]))
        return F.cross_entropy(output, targets)


@pytest.mark.contract
@pytest.mark.parametrize("forward", [reads_gradients, clips_gradients, drops_gradients])
@pytest.mark.parametrize("whole_batch", [False, True])
def test_forward_finds_no_gradients_of_sub_steps(devices, forward, whole_batch):
    """Each sub-step found those of its replica's earlier ones, in silence."""
    with ScatterOnceParallel(model_with(forward), 3, devices(2)) as engine:
        for _ in range(2):
            assert_step(engine, ROWS, LABELS, LOSS, whole_batch=whole_batch)


def test_criterion_finds_no_gradients_of_sub_steps(devices):
    with ScatterOnceParallel(linear(), 3, devices(2)) as engine:
        for _ in range(2):
            assert_step(engine, ROWS, LABELS, ReadsItsOwn())


def test_interrupt_at_the_end_drops_gradients():
    """Python may raise it in ``__exit__``, before the manager puts gradients back.

    Its generator ends when the error is dropped, perhaps during the next step.
    """
    leaf = nn.Parameter(torch.ones(2))
    leaf.grad = torch.ones(2)
    manager = gradients_put_aside([leaf], [])
    manager.__enter__()
    assert leaf.grad is None
    del manager
    assert leaf.grad is None
