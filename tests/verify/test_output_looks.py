"""The pair's looks: losses that do not combine are refused, others leave no trace."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from harness.looks import (
    INPUTS,
    LABELS,
    VALUES,
    WithBalance,
    balancing,
    calls,
    counted,
    in_a_def,
    net,
    squares,
)
from harness.models import CLASSES, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    seeded,
    whole_batch,
)
from harness.weighted import classes, padded
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, DataParallelModel, count_labels, gather

ROWS = len(INPUTS)


def added_up(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def contrastive(output, _):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def penalised(output, targets):
    return added_up(output, targets) + 3.0


GATHER = r"call the plain criterion on gather\(outputs, device\)"
REFUSED = {  # a criterion, its targets, options, the remedy
    "a sum": (added_up, LABELS, {}, 'pass reduction="sum"'),
    "ignored labels": (
        in_a_def,
        padded(ROWS),
        {},
        r"count=scatterpar\.count_labels\(\)",
    ),
    "a mean that is called a sum": (
        in_a_def,
        LABELS,
        {"reduction": "sum"},
        'pass reduction="mean", without count=',
    ),
    "a contrastive loss": (contrastive, LABELS, {}, GATHER),
    "a spread": (lambda o, _: o.std(0).sum(), LABELS, {}, GATHER),
    "a penalty beside a sum": (
        penalised,
        LABELS,
        {"reduction": "sum"},
        "does not depend on the rows, .*, add it after the call\\.",
    ),
    "a wrong count": (
        nn.MSELoss(),
        VALUES,
        {"count": lambda _, t: t.abs().sum()},
        "It seems to be a mean over rows",
    ),
}
RIGHT = {
    "cross entropy, ignored labels": (nn.CrossEntropyLoss(), padded(ROWS), {}),
    "a counted mean": (in_a_def, padded(ROWS), {"count": count_labels()}),
    "a sum that is called one": (squares, VALUES, {"reduction": "sum"}),
    "torch's own sum": (nn.MSELoss(reduction="sum"), VALUES, {}),
    "a mean": (F.mse_loss, VALUES, {}),
    "dropout in the criterion": (
        lambda o, t: F.mse_loss(F.dropout(o), t),
        VALUES,
        {},
    ),
    "writes into what it is given": (lambda o, t: F.mse_loss(o.mul_(2), t), VALUES, {}),
}


@pytest.fixture(
    params=[
        pytest.param(["cpu"] * 2, id="shared", marks=pytest.mark.slow),
        pytest.param(["cpu:0", "cpu:1", "cpu:0"], id="mixed"),
    ]
)
def device_ids(request):
    return request.param


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_dont_combine_refused(device_ids, name):
    """They trained in silence."""
    criterion, targets, options, words = REFUSED[name]
    model = DataParallelModel(mlp(), device_ids)
    loss_of = DataParallelCriterion(criterion, device_ids)
    outputs = model(INPUTS)
    text = re.compile(f"your loss of .* rows is not the .*{words}", re.S)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            loss_of(outputs, targets, **options)
    unchecked = DataParallelCriterion(criterion, device_ids, verify=False)
    assert unchecked(outputs, targets, **options).ndim == 0


@pytest.mark.draws
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_exact_draws_unchanged(device_ids, name):
    criterion, targets, options = RIGHT[name]
    gradients = []
    for verify in (True, False):
        module = mlp()
        model = DataParallelModel(module, device_ids)
        loss_of = DataParallelCriterion(
            copy.deepcopy(criterion), device_ids, verify=verify
        )
        with seeded(0):
            for _ in range(2):
                loss_of(model(INPUTS), targets, **options).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert all(map(torch.equal, *gradients))


def test_injected_gradient_refused(device_ids):
    """The balance loss counted once per replica, without a word."""
    injects = net(balancing(lambda gates: gates.square().mean()))
    outputs = DataParallelModel(build(injects), device_ids)(INPUTS)
    criterion = DataParallelCriterion(nn.MSELoss())
    for _ in range(3):
        with pytest.raises(ValueError, match="adds a gradient that is not the"):
            criterion(outputs, VALUES)
    criterion.verify = False
    criterion(outputs, VALUES).backward()  # the look has left the graph


INJECTED = {  # where the gradient of the function goes first
    "another node": balancing(lambda gates: gates.square().mean()),
    "a parameter": lambda net, rows: WithBalance.apply(
        net.linear(rows), net.linear.weight.sum()
    ),
    "a copy of a parameter": lambda net, rows: (
        net.linear(rows)
        @ WithBalance.apply(torch.eye(CLASSES).double(), net.linear.bias.sum())
    ),
}


@pytest.mark.parametrize("name", INJECTED)
def test_injected_gradient_refused_as_gradients_wait(device_ids, name):
    """A gradient of all leaves was asked for, which ``no_sync`` refuses: no answer."""
    module = build(net(INJECTED[name]))
    model = DataParallelModel(module, device_ids)
    unchecked = DataParallelCriterion(nn.MSELoss(), verify=False)
    with model.no_sync():
        for loss_of in (unchecked, unchecked):
            loss_of(model(INPUTS), VALUES).backward()
        with pytest.raises(ValueError, match="adds a gradient that is not the"):
            DataParallelCriterion(nn.MSELoss())(model(INPUTS), VALUES)
    unchecked(model(INPUTS), VALUES).backward()
    waited = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    for _ in range(3):
        unchecked(model(INPUTS), VALUES).backward()
    for gradient, parameter in zip(waited, module.parameters(), strict=True):
        assert_close(gradient, parameter.grad, "what has waited")


def test_calls_1_2_4_8_are_looked_at(device_ids):
    looks = []
    criterion = counted(lambda o, t: F.mse_loss(o, t))
    loss_of = DataParallelCriterion(criterion, device_ids)
    model = DataParallelModel(mlp(), device_ids)
    for number in range(1, 18):
        calls().number = 0
        loss_of(model(INPUTS), VALUES)
        if calls().number > len(device_ids):
            looks.append(number)
    assert looks == [1, 2, 4, 8, 16]


def test_remedy_gather_gives_one_devices_grad(device_ids):
    module = mlp()
    _, expected = whole_batch(module, INPUTS, LABELS, contrastive)
    outputs = DataParallelModel(module, device_ids)(INPUTS)
    contrastive(gather(outputs, "cpu"), LABELS).backward()
    assert_gradients(module, expected)


def test_unchecked_told_once_state_stays(device_ids):
    class Counts(nn.Module):
        calls = 0

        def forward(self, output, targets):
            self.calls += 1
            return F.mse_loss(output, targets) * float("nan")

    criterion = DataParallelCriterion(Counts(), device_ids)
    outputs = DataParallelModel(mlp(), device_ids)(INPUTS)

    def calls():
        for _ in range(20):
            criterion(outputs, VALUES)

    words = "(?s)could not check how.*Pass count= .*gather"
    with pytest.warns(UserWarning, match=words) as caught:
        calls()
    assert len(caught) == 1
    assert criterion.module.calls == 20  # the first replica's, which is the module
    again = pickle.loads(pickle.dumps(DataParallelCriterion(nn.MSELoss())))
    expected = F.mse_loss(gather(outputs, "cpu"), VALUES)
    assert_close(again(outputs, VALUES).detach(), expected.detach(), "loss")


class Remembers:
    """A criterion with a memory bank."""

    def __init__(self):
        self.bank = []

    def __call__(self, output, targets):
        loss = F.mse_loss(output, targets)
        for mean in self.bank[-4:]:
            loss = loss + F.mse_loss(output.mean(0), mean)
        self.bank.append(output.detach().mean(0))
        return loss


class Normalises(nn.Module):
    """A criterion with a batch normalisation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES).double()

    def forward(self, output, targets):
        return F.mse_loss(self.norm(output), targets)


class Counts(nn.Module):
    """A criterion with a number that each call moves."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, targets):
        self.calls += 1
        return F.mse_loss(output, targets)


TOLD = {
    "a memory bank": (Remembers, "another result when it is called again"),
    "a batch normalisation": (
        Normalises,
        "normalises over the rows of this device only",
    ),
    "a number of calls": (Counts, "move the attribute 'calls'"),
}


@pytest.mark.parametrize("name", TOLD)
def test_state_of_criterion_told(device_ids, name):
    make, words = TOLD[name]
    criterion = DataParallelCriterion(make(), device_ids)
    outputs = DataParallelModel(mlp(), device_ids)(INPUTS)
    with pytest.warns(UserWarning, match=words) as caught:
        criterion(outputs, VALUES)
    assert len(caught) == 1


def test_one_replica_combines_nothing():
    model = DataParallelModel(mlp(), ["cpu"])
    loss = DataParallelCriterion(contrastive)(model(INPUTS), classes(ROWS))
    assert torch.equal(loss, contrastive(*model(INPUTS), None))


def of_even_rows(output, targets):
    """Leaves out the last row of an odd number."""
    even = len(output) // 2 * 2
    return (output[:even] - targets[:even]).square().mean()


def test_few_rows_compared_as_the_call_divides_them(devices):
    """Four rows: two parts of two rows agree, and the shares have 2, 1 and 1."""
    criterion = DataParallelCriterion(of_even_rows, devices(3))
    outputs = DataParallelModel(mlp(), devices(3))(INPUTS[:4])
    with pytest.raises(ValueError, match=r"losses of 2 \+ 1 \+ 1 rows"):
        criterion(outputs, VALUES[:4])
