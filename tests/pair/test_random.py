"""Random numbers: another mask in every replica, the same ones in every run and recomputation."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.noise import BATCH, NUMBERED, ROWS, VARIANTS, Masks, Noisy, dropout_model, equal
from helpers.oracle import assert_close, build, randn
from torch import nn

from pair.common import Pair
from scatterpar import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.draws


@pytest.fixture(autouse=True)
def _forget_masks():
    Masks.drawn.clear()
    yield
    Masks.drawn.clear()
    Masks.replay = False


def step(pair, seed):
    torch.manual_seed(seed)
    pair.module.zero_grad()
    pair.loss(*BATCH).backward()
    return [parameter.grad.clone() for parameter in pair.module.parameters()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_masks_that_were_drawn(placed, variant):
    """Under checkpointing the masks are drawn again, in backward, in the caller's thread."""
    model, twin = build(lambda: Noisy(VARIANTS[variant])), build(Noisy)
    pair = Pair(model, nn.CrossEntropyLoss(), placed(4))
    for seed in range(2):
        Masks.drawn.clear()
        Masks.replay = False
        torch.manual_seed(seed)
        model.zero_grad()
        loss = pair.loss(NUMBERED, BATCH[1])
        between = torch.rand(3)  # others draw before backward, and get what they would get
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert between.unique().numel() == 3
        assert len(Masks.drawn) == ROWS
        Masks.replay = True
        twin.zero_grad()
        expected = nn.CrossEntropyLoss()(twin(NUMBERED), BATCH[1])
        expected.backward()
        assert_close(loss.detach(), expected.detach(), "loss")
        for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_close(mine.grad, its.grad, name)


def test_replicas_draw_different_masks(placed):
    outputs = DataParallelModel(nn.Dropout(0.5), placed(4))(torch.ones(4, 100))
    rows = torch.cat(outputs)
    assert all(not torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i))
    assert 150 < (rows != 0).sum() < 250


def test_steps_repeat_bit_for_bit_and_differ_by_seed(placed):
    pair = Pair(dropout_model(), nn.CrossEntropyLoss(), placed(4))
    first = step(pair, 1)
    assert all(equal(step(pair, 1), first) for _ in range(4))
    assert not equal(step(pair, 2), first)
    assert equal(step(Pair(dropout_model(), nn.CrossEntropyLoss(), placed(4)), 1), first)


def test_one_forward_after_another_draws_anew(placed):
    pair = DataParallelModel(nn.Dropout(0.5), placed(2))
    torch.manual_seed(0)
    one, two = (torch.cat(pair(torch.ones(4, 100))) for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_one_replica_draws_what_the_plain_model_draws(device):
    model, inputs = dropout_model(), randn(6, FEATURES)
    torch.manual_seed(3)
    expected = model(inputs)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    (output,) = DataParallelModel(model, [device])(inputs)
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_criterion_that_draws(placed):
    def criterion(output, targets):
        return (nn.functional.dropout(output, 0.5) - targets).square().mean()

    outputs = DataParallelModel(mlp(), placed(3))(BATCH[0])
    targets = randn(ROWS, CLASSES)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(DataParallelCriterion(criterion, placed(3))(outputs, targets).item())
    assert found[0] == found[1] != found[2]


def test_what_draws_nothing_leaves_the_generator_alone(placed):
    state = torch.get_rng_state()
    Pair(mlp(), nn.CrossEntropyLoss(), placed(3)).check(*BATCH)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failure_puts_the_generator_back(placed):
    class Fails(nn.Module):
        def forward(self, inputs):
            nn.functional.dropout(inputs, 0.5)
            raise ArithmeticError("no")

    for replicas in (1, 3):
        state = torch.get_rng_state()
        with pytest.raises(ArithmeticError):
            DataParallelModel(Fails(), placed(replicas))(BATCH[0])
        assert torch.equal(torch.get_rng_state(), state)
