"""Buffers that share memory from some forward pass on, or until one: as in plain torch.

Writes to one of them show in the other, in the same step and in later ones.
"""

from __future__ import annotations

import copy
from itertools import combinations

import pytest
import torch
from harness.models import CLASSES, FEATURES
from harness.oracle import assert_close, build, randint, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

BATCH = randn(11, FEATURES), randint(CLASSES, 11)
CRITERION = nn.CrossEntropyLoss()
STEPS = 5


class Net(nn.Module):
    """``act(net, call)`` is called in each forward pass, and the buffers shift logits.

    The buffers are ``bank`` of two rows, ``old`` and ``new`` of one, and ``row``.
    """

    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("bank", torch.arange(2.0 * CLASSES).reshape(2, CLASSES))
        self.register_buffer("old", torch.zeros(CLASSES))
        self.register_buffer("new", torch.ones(CLASSES))
        self.register_buffer("row", torch.zeros(CLASSES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.act = act

    def forward(self, inputs):
        self.act(self, int(self.calls))
        self.calls += 1
        shift = self.old + 2 * self.new + 3 * self.row + 4 * self.bank[1]
        scale = torch.linspace(0, 1, CLASSES, dtype=inputs.dtype)
        return self.linear(inputs) + 0.1 * shift * scale


def fresh(net):
    """A tensor that no buffer has yet."""
    return net.new.detach() * 0.5 + torch.arange(CLASSES)


# --- what forward passes do ---


def one_is_the_other(net, call):
    if call == 0:
        net.old = net.new
    net.new += 0.1


def other_is_written(net, call):
    if call == 1:
        net.old = net.new
    net.old += 0.1


def row_of_a_bank(net, call):
    if call == 0:
        net.row = net.bank[1]
    net.bank += 0.1


def moving_row_of_a_bank(net, call):
    net.row = net.bank[call % 2]
    net.bank += 0.1
    net.row *= 2


def both_are_new(net, call):
    if call == 1:
        net.old = net.new = fresh(net)
    net.new += 0.1


def row_of_a_new_bank(net, call):
    if call == 0:
        bank = torch.stack([fresh(net), net.new])
        net.row = bank[1]  # before the bank
        net.bank = bank
    net.bank *= 1.5


def three_are_one(net, call):
    if call == 0:
        net.old = net.new
        net.row = net.old
    net.row += 0.1


def exchanged_storage(net, call):
    if call == 0:
        net.old.data = net.new
    net.new += 0.1


def memory_of_a_parameter(net, call):
    if call == 1:
        net.row = net.linear.bias.detach()


def tied_in_a_child(net, call):
    if call == 0:
        net.child.old = net.new
    net.new += 0.1
    net.row = net.child.old * 1


def anew_in_each_call(net, call):
    net.old = net.new
    net.new = fresh(net)


def now_and_then(net, call):
    if call % 2:
        net.old = net.new
    else:
        net.new = fresh(net)
    net.new += 0.1


def apart(net, call):
    if call == 1:
        net.new = fresh(net)
    net.new += 0.1


def first_apart(net, call):
    if call == 1:
        net.old = fresh(net)
    net.new += 0.1


def row_apart(net, call):
    if call == 1:
        net.row = fresh(net)
    net.bank += 0.1


def parts_of_one(net, call):
    both = torch.stack([fresh(net), net.old], 1)
    net.old, net.new = both.unbind(1)


def nothing_registered(net, call):
    if call == 0:
        net.none = net.bank[0]
    net.bank += 0.1
    net.row = net.none * 2


# --- what the buffers are at the beginning ---


def two_of_one(net):
    net.new = net.old


def a_row(net):
    net.row = net.bank[1]


def a_bias(net):
    net.row = net.linear.bias.detach()


def a_child(net):
    net.child = nn.Module()
    net.child.register_buffer("old", torch.zeros_like(net.old))


def a_none(net):
    net.register_buffer("none", None)


CASES = {
    "one is the other": (one_is_the_other,),
    "the other is written": (other_is_written,),
    "a row of a bank": (row_of_a_bank,),
    "a moving row of a bank": (moving_row_of_a_bank,),
    "both are new": (both_are_new,),
    "a row of a new bank": (row_of_a_new_bank,),
    "three are one": (three_are_one,),
    "exchanged storage": (exchanged_storage,),
    "the memory of a parameter": (memory_of_a_parameter,),
    "in a child": (tied_in_a_child, a_child),
    "anew in each call": (anew_in_each_call,),
    "now and then": (now_and_then,),
    "a None becomes a row": (nothing_registered, a_none),
    "the second apart": (apart, two_of_one),
    "the first apart": (first_apart, two_of_one),
    "a row apart": (row_apart, a_row),
    "a row moves": (moving_row_of_a_bank, a_row),
    "a bias apart": (row_apart, a_bias),
    "parts of one": (parts_of_one,),
}


def made(act, prepare=lambda net: None):
    net = build(lambda: Net(act))
    prepare(net)  # after ``build``, which gives each buffer memory of its own
    return net


def sharing(net):
    """The pairs of names of buffers and parameters that share memory."""
    named = [*net.named_buffers(remove_duplicate=False), *net.named_parameters()]
    return [
        (first, second)
        for (first, one), (second, other) in combinations(named, 2)
        if one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    ]


def trained(net, loss_of):
    """The losses of some steps, and the values of all tensors at the end."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(*BATCH))
        optimizer.step()
    return torch.stack(losses), dict(net.state_dict())


def assert_as_plain(case, net, loss_of):
    plain = made(*CASES[case])

    def plain_loss(inputs, targets):
        loss = CRITERION(plain(inputs), targets)
        loss.backward()
        return loss.detach()

    expected, expected_values = trained(plain, plain_loss)
    losses, values = trained(net, loss_of)
    assert_close(losses, expected, "losses")
    for name, value in expected_values.items():
        assert_close(values[name], value, name)
    if case != "parts of one":  # which share no element
        assert sharing(net) == sharing(plain)


@pytest.mark.parametrize("case", CASES)
def test_engine_keeps_what_shares_memory(case, devices):
    net = made(*CASES[case])
    with ScatterOnceParallel(net, 1, devices(2)) as engine:
        assert_as_plain(
            case, net, lambda *batch: engine.forward_backward(*batch, CRITERION)
        )


@pytest.mark.parametrize("case", CASES)
def test_pair_keeps_what_shares_memory(case, devices):
    net = made(*CASES[case])
    model = DataParallelModel(net, devices(2))
    criterion = DataParallelCriterion(CRITERION)

    def loss_of(inputs, targets):
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss.detach()

    assert_as_plain(case, net, loss_of)


def test_one_replica_with_one_substep_keeps_it():
    net = made(row_of_a_bank)
    with ScatterOnceParallel(net, 1, ["cpu"]) as engine:
        assert_as_plain(
            "a row of a bank",
            net,
            lambda *batch: engine.forward_backward(*batch, CRITERION),
        )


def test_the_users_tensors_stay_where_nothing_shares(devices):
    """Rebound buffers are written in place, so that references of the user's hold."""
    net = made(parts_of_one)
    held = dict(net.named_buffers())
    with ScatterOnceParallel(net, 1, devices(2)) as engine:
        for _ in range(3):
            engine.forward_backward(*BATCH, CRITERION)
        assert engine._replicas.of_model.builds == 1
    assert all(held[name] is buffer for name, buffer in net.named_buffers())


def test_held_bank_stays_the_bank(devices):
    net = made(row_of_a_bank)
    bank = net.bank
    with ScatterOnceParallel(net, 1, devices(2)) as engine:
        engine.forward_backward(*BATCH, CRITERION)
    assert net.bank is bank
    bank.zero_()
    assert not net.row.any()


def test_overlap_in_part_is_refused(devices):
    """Neither buffer has all of the other's memory: nothing is changed."""

    def act(net, call):
        values = torch.arange(CLASSES + 1, dtype=net.old.dtype)
        net.old, net.new = values[1:], values[:-1]

    net = made(act)
    before = copy.deepcopy(net.state_dict())
    with (
        ScatterOnceParallel(net, 1, devices(2)) as engine,
        pytest.raises(ValueError, match=r"buffers 'new', 'old'.*clone\(\)"),
    ):
        engine.forward_backward(*BATCH, CRITERION)
    assert all(torch.equal(before[name], now) for name, now in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_part_of_a_buffer_with_gaps_is_refused(devices):
    """Replicas have no gaps, so the part's elements are elsewhere."""
    net = made(row_of_a_bank)
    net.bank = torch.zeros(2, 2 * CLASSES, dtype=net.bank.dtype)[:, ::2]
    bank = net.bank
    with (
        ScatterOnceParallel(net, 1, devices(2)) as engine,
        pytest.raises(ValueError, match=r"shares? the memory of 'bank'.*clone\(\)"),
    ):
        engine.forward_backward(*BATCH, CRITERION)
    assert net.bank is bank
    assert not bank.any()


def test_hook_that_raises_unties_again(devices):
    def hook(_):
        raise ArithmeticError

    net = made(one_is_the_other)
    net.linear.weight.register_hook(hook)
    old = net.old
    with (
        ScatterOnceParallel(net, 1, devices(2)) as engine,
        pytest.raises(ArithmeticError),
    ):
        engine.forward_backward(*BATCH, CRITERION)
    assert net.old is old
    assert not old.any()
    assert torch.equal(net.new, torch.ones_like(net.new))


def test_inference_of_a_training_module_keeps_it(devices):
    net = made(one_is_the_other)
    with ScatterOnceParallel(net, 1, devices(2)) as engine, torch.no_grad():
        engine(BATCH[0])
    assert net.old is net.new


def test_users_exchange_of_a_storage_is_followed(devices):
    """Replicas have the same shapes then, and other buffers that share memory."""
    net = made(other_is_written)
    with ScatterOnceParallel(net, 1, devices(2)) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        net.new.data = net.old
        net.calls.fill_(5)
        plain = copy.deepcopy(net)
        plain.new.data = plain.old
        loss = engine.forward_backward(*BATCH, CRITERION)
        assert_close(loss, CRITERION(plain(BATCH[0]), BATCH[1]).detach(), "loss")
