"""The whole batch's gradient, per parameter; every kind of loss is in test_weighted_losses.py."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, assert_gradients, gradients, randint, randn
from helpers.weighted import padded
from torch import nn
from torch.nn.functional import cross_entropy

from pair.common import assert_pair
from scatterpar import DataParallelCriterion, DataParallelModel

EVEN, RAGGED = 12, 11


def counted(output, targets):
    """A mean over the positions that are not padding."""
    return cross_entropy(output, targets, ignore_index=-100)


@pytest.mark.parametrize(("rows", "answer"), [(EVEN, "number"), (RAGGED, "tensor")])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_count_gets_each_output_with_its_targets(placed, replicas, rows, answer):
    seen = []

    def count(output, targets):
        seen.append((len(output), len(targets)))
        number = (targets != -100).sum()
        return number if answer == "tensor" else int(number)

    batch = randn(rows, FEATURES), padded(rows)
    assert_pair(mlp(), *batch, counted, placed(replicas), count=count)
    assert [a for a, _ in seen] == [b for _, b in seen]
    assert sum(a for a, _ in seen) == rows
    assert len(seen) == replicas


def test_a_weight_tied_between_model_and_criterion(placed):
    class Tied(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, output, targets):
            return cross_entropy(output @ self.weight, targets)

    def step(model, run):
        run(model, Tied(model[2].weight)).backward()
        return gradients(model)

    inputs, targets = randn(7, FEATURES), randint(7, 7)
    expected = step(mlp(), lambda model, head: head(model(inputs), targets))

    def pair(model, head):
        outputs = DataParallelModel(model, placed(3))(inputs)
        return DataParallelCriterion(head, placed(3))(outputs, targets)

    model = mlp()
    step(model, pair)
    assert_gradients(model, expected)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_sixteen_calls_before_a_step_are_the_whole_batch(placed, loss):
    rows = 16 * 5 - 3
    inputs, targets = randn(rows, FEATURES), randint(CLASSES, rows)
    model, whole = mlp(), mlp()
    expected = nn.CrossEntropyLoss(reduction=loss)(whole(inputs), targets)
    expected.backward()
    pair = DataParallelModel(model, placed(3))
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(reduction=loss), placed(3))
    total = torch.zeros(()).double()
    for some, its in zip(inputs.tensor_split(16), targets.tensor_split(16), strict=True):
        part = criterion(pair(some), its) * (len(some) / rows if loss == "mean" else 1)
        part.backward()
        total += part.detach()
    assert_close(total, expected.detach(), "loss")
    assert_gradients(model, gradients(whole))
    after = []
    for net in (model, whole):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        after.append(net(inputs).detach())
    assert_close(*after, "outputs after the step")


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_one_replica_is_the_plain_model_bit_for_bit(device):
    inputs, targets = randn(11, FEATURES), randint(CLASSES, 11)
    model, whole = mlp().float(), mlp().float()
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(
        DataParallelModel(model, [device])(inputs.float()), targets
    )
    expected = nn.CrossEntropyLoss()(whole(inputs.float()), targets)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_runs_repeat_bit_for_bit(placed):
    inputs, targets = randn(11, FEATURES).float(), randint(CLASSES, 11)
    found = []
    for _ in range(5):
        model = mlp().float()
        outputs = DataParallelModel(model, placed(4))(inputs)
        loss = DataParallelCriterion(nn.CrossEntropyLoss(), placed(4))(outputs, targets)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
