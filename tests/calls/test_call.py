"""A call of the engine, of the pair and of the plain module: the same gradients."""

import contextlib
import warnings

import pytest
import torch
from harness.oracle import assert_gradients, build, gradients, randint, randn

from calls.programs import PROGRAMS, SELECTING
from scatterpar import DataParallelModel, ScatterOnceParallel, gather

LAYOUTS = [["cpu"], ["cpu"] * 2, ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:0"]]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids="+".join)
ROWS, LABELS = randn(13, 6), randint(3, 13)


def run(program, call, net, no_sync, calls):
    """The losses of some calls, whose gradients are accumulated."""
    losses = []
    for number in range(calls):
        rows, labels = ROWS[number : number + 9 + number], LABELS[number:][: 9 + number]
        is_last = number + 1 == calls
        with contextlib.nullcontext() if is_last else no_sync():
            loss = program.loss(call, net, rows, labels[: len(rows)])
            loss.backward()
        losses.append(loss.detach())
    return losses


def check_program(program, layout, calls):
    net, plain = build(program.make), build(program.make)
    expected = run(program, plain, plain, contextlib.nullcontext, calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ScatterOnceParallel(net, device_ids=layout) as engine:
            found = run(program, engine, net, engine.no_sync, calls)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert_gradients(net, gradients(plain))


@layouts
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_plain_torch(name, layout):
    check_program(PROGRAMS[name], layout, 1)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [2, 4])
@layouts
@pytest.mark.parametrize("name", PROGRAMS)
def test_accumulated_program_equals_plain_torch(name, layout, calls):
    check_program(PROGRAMS[name], layout, calls)


OF_THE_PAIR = [name for name, program in PROGRAMS.items() if not program.engine_alone]


@pytest.mark.parametrize("calls", [1, pytest.param(3, marks=pytest.mark.slow)])
@layouts
@pytest.mark.parametrize("name", OF_THE_PAIR)
def test_program_of_the_pair_equals_plain_torch(name, layout, calls):
    program = PROGRAMS[name]
    net, plain = build(program.make), build(program.make)
    expected = run(program, plain, plain, contextlib.nullcontext, calls)
    pair = DataParallelModel(net, layout)

    def call(*args, **kwargs):
        return gather(pair(*args, **kwargs), "cpu")

    found = run(program, call, net, pair.no_sync, calls)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert_gradients(net, gradients(plain))


@layouts
@pytest.mark.parametrize("name", SELECTING)
def test_selected_gradients_are_whole(name, layout):
    check_program(SELECTING[name], layout, 1)
