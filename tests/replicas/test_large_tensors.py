"""Large tensors that stay as they are, and those that somebody writes: in whatever way."""

from __future__ import annotations

import copy

import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_close, assert_step, build, randint, randn
from harness.pairwise import few_of
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.replicas.large_tensors import LARGE_BYTES

pytestmark = pytest.mark.core

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()
LENGTH = 2 * LARGE_BYTES // 8
PLACE = 12_345  # no sample has it


def looks_up(m, inputs):
    return m.linear(inputs) * (1 + m.table[:4]) + m.table[PLACE]


def as_buffer(table):
    return {"table": nn.Buffer(table)}


def as_attribute(table):
    return {"table": table}


def as_frozen(table):
    return {"table": nn.Parameter(table, requires_grad=False)}


KINDS = {"buffer": as_buffer, "attribute": as_attribute, "frozen": as_frozen}


def model_with(kind, forward=looks_up):
    table = randn(LENGTH)
    return Of(forward, linear=linear(), **KINDS[kind](table))


def adds(table, number):
    with torch.no_grad():
        table.add_(0.1)


def adds_without_version(table, number):
    table.data.mul_(0.9)


def writes_one_place(table, number):
    with torch.no_grad():
        table[PLACE] += 1


def writes_one_place_without_version(table, number):
    """From the second step on, when all of it is read."""
    table.detach().numpy()[PLACE] += 1


def exchanges_its_memory(table, number):
    table.data = table.data + 1


def now_and_then(table, number):
    if number == 3:
        table.data.add_(1)


WRITERS = (
    adds,
    adds_without_version,
    writes_one_place,
    writes_one_place_without_version,
    exchanges_its_memory,
    now_and_then,
)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", few_of(KINDS, ["frozen"]))
def test_writes_between_steps_reach_replicas(devices, kind, write):
    model = model_with(kind)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for number in range(6):
            assert_step(engine, ROWS, LABELS, LOSS)
            write(model.table, number)


@pytest.mark.parametrize("whole_batch", few_of([False, True], [False]))
@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_tensors_not_sent(devices, kind, whole_batch):
    model = model_with(kind)
    before, values = model.table._version, model.table.clone()
    sent = []
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for _ in range(4):
            assert_step(engine, ROWS, LABELS, LOSS, whole_batch=whole_batch)
            sent.append(engine.last_step.bytes["replicate"])
            for replica in engine.replicas:
                assert torch.equal(replica.table, values)
        versions = [replica.table._version for replica in engine.replicas]
        engine.forward_backward(ROWS, LABELS, LOSS)
        assert [replica.table._version for replica in engine.replicas] == versions
    assert model.table._version == before
    # Parameters of one layer are small.
    assert all(size < LARGE_BYTES for size in sent[1:])


def appends(m, inputs):
    """A queue, of which each call writes a part."""
    with torch.no_grad():
        m.table[PLACE] += 1
    return m.linear(inputs) + m.table[PLACE]


def decays(m, inputs):
    m.table.data.mul_(0.9)
    return m.linear(inputs) + m.table[PLACE]


def writes_a_part_without_version(m, inputs):
    m.table.data[PLACE] += 1
    return m.linear(inputs) + m.table[PLACE]


def rebinds(m, inputs):
    m.table = m.table + 1
    return m.linear(inputs) + m.table[PLACE]


@pytest.mark.filterwarnings("ignore:forward passes move")
@pytest.mark.parametrize(
    "forward", [appends, decays, writes_a_part_without_version, rebinds]
)
def test_forward_writes_reach_the_module(devices, forward):
    model = model_with("buffer", forward)
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for _ in range(6):
            plain.zero_grad(), model.zero_grad()
            LOSS(plain(ROWS), LABELS).backward()
            engine.forward_backward(ROWS, LABELS, LOSS)
            assert torch.equal(model.table, plain.table)
            for name, parameter in plain.named_parameters():
                assert_close(model.get_parameter(name).grad, parameter.grad, name)


def test_hook_writes_restored_if_later_raises(devices):
    model = model_with("buffer")

    def writes(_):
        model.table[PLACE] += 1

    def fails(_):
        raise ArithmeticError("a hook")

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(ROWS, LABELS, LOSS)
        model.linear.weight.register_post_accumulate_grad_hook(writes)
        model.linear.bias.register_post_accumulate_grad_hook(fails)
        with nothing_changes(model), pytest.raises(ArithmeticError):
            engine.forward_backward(ROWS, LABELS, LOSS)


def test_table_follows_memory_it_shares(devices):
    def forward(m, inputs):
        return m.linear(inputs) + m.flat[PLACE] + m.weight[0, :4]

    def make():
        weight = nn.Parameter(torch.randn(2, LENGTH // 2))
        return Of(forward, linear=nn.Linear(FEATURES, CLASSES), weight=weight)

    model = build(make)
    model.register_buffer("flat", model.weight.data.view(-1), persistent=False)
    optimizer = torch.optim.SGD([model.weight], 10.0)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for _ in range(4):
            engine.forward_backward(ROWS, LABELS, LOSS)
            optimizer.step()
            for replica in engine.replicas:
                assert torch.equal(replica.flat, model.flat)
