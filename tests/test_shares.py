"""Shares of different sizes, given or learned; for any shares: ``test_properties.py``."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from helpers.models import Of
from helpers.oracle import assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.plan import ShareBalancer, make_plan

pytestmark = pytest.mark.draws

CPU = torch.device("cpu")
TWO = FAST, SLOW = torch.device("cpu", 0), torch.device("cpu", 1)
SLOWER = 4


@pytest.mark.parametrize(
    ("shares", "accum", "substeps"),
    [
        ([0.3, 0.7], 5, [3, 7]),
        ([0.1, 0.5], 6, [2, 10]),
        ([1 / 7, 6 / 7], 7, [2, 12]),
        ([1e-12, 1], 2, [1, 4]),
    ],
    ids=str,
)
def test_rounding_of_the_given_numbers_makes_no_sub_step_more(shares, accum, substeps):
    """A float's 0.3 of 0.3 + 0.7 is more than three tenths: ten times that was cut into four."""
    plan = make_plan(1000, [CPU] * 2, accum, shares=shares)
    assert [len(share.micro_batches) for share in plan.shares] == substeps
    largest = max(b - a for share in plan.shares for a, b in share.micro_batches)
    assert largest <= math.ceil(1000 / (2 * accum))


@pytest.mark.parametrize("rows", [1, 3, 9, 4096])
def test_equal_shares_are_the_plan_without_any(rows):
    assert make_plan(rows, [CPU] * 4, 5, shares=[2.5] * 4) == make_plan(rows, [CPU] * 4, 5)


def test_the_micro_batch_size_holds_for_every_share():
    plan = make_plan(100, [CPU] * 2, micro_batch_size=8, shares=[3, 1])
    assert [share.rows for share in plan.shares] == [75, 25]
    assert [len(share.micro_batches) for share in plan.shares] == [10, 4]


@pytest.mark.parametrize("device_ids", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]], ids=str)
@pytest.mark.parametrize("rows", [2, 7, 37])
def test_the_gradient_is_exact(device_ids, rows):
    model = build(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    inputs, targets = randn(rows, 6), randint(3, rows)
    with ScatterOnceParallel(model, accum=3, device_ids=device_ids, shares=[5, 1, 2]) as engine:
        assert_step(engine, inputs, targets, nn.CrossEntropyLoss())
        assert engine.shares == (5, 1, 2)
        assert engine.last_step.plan == engine.plan(rows)
        torch.testing.assert_close(engine.eval()(inputs), model(inputs))


def spans(plan, pace):
    """When replicas start and end that work at ``pace``, in rows per second."""
    return [{share.replica: (0.0, share.rows / pace[share.device]) for share in plan.shares}]


def simulate(devices, pace, steps, rows=400):
    learner = ShareBalancer("auto", devices)
    history = []
    for _ in range(steps):
        plan = make_plan(rows, devices, 4, shares=learner.shares)
        learner.observe(plan, spans(plan, pace))
        history.append(learner.shares)
    return history


def parts(shares):
    return [share / sum(shares) for share in shares]


def test_a_device_slowed_four_times_settles_within_two_steps():
    history = simulate(TWO, {FAST: 400.0, SLOW: 100.0}, 3)
    assert history[0] == (1.0, 1.0)  # the first step is skipped: it pays for much that is new
    assert parts(history[1]) == pytest.approx([0.8, 0.2])
    assert history[2] == history[1]


def test_equal_entries_have_equal_shares():
    history = simulate([FAST, SLOW, FAST], {FAST: 300.0, SLOW: 100.0}, 2)
    one, other, third = parts(history[1])
    assert one == third == pytest.approx(3 / 7, rel=0.02)  # two at once on the fast device
    assert other == pytest.approx(1 / 7, rel=0.02)


def test_a_gain_of_a_few_per_cent_moves_nothing():
    assert set(simulate(TWO, {FAST: 103.0, SLOW: 100.0}, 6)) == {(1.0, 1.0)}


def test_one_slow_step_moves_nothing_for_long():
    learner = ShareBalancer("auto", TWO)
    even = make_plan(400, TWO, 4)
    for pace in (100.0, 100.0, 100.0, 10.0, 100.0):
        learner.observe(even, spans(even, {FAST: 100.0, SLOW: pace}))
    assert learner.shares == (1.0, 1.0)


class Clock(threading.local):
    """What each thread has spent, in seconds, however busy the machine is."""

    seconds = 0.0


CLOCK = Clock()


def slowly(model, inputs):
    """The second virtual device takes four times as long for a row."""
    device = inputs.mean().item()  # the rows say which device they are on
    CLOCK.seconds += 0.002 * len(inputs) * (SLOWER if device else 1)
    return inputs * model.weight


def rows_by_device(engine):
    rows = torch.zeros(20, 1)
    rows[engine.plan(20).shares[0].rows :] = 1
    return rows


def test_the_engine_learns_from_its_steps_alone(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK.seconds)

    class Fails(Exception):
        pass

    def fails(outputs, targets):
        raise Fails

    model = Of(slowly, weight=nn.Parameter(torch.ones(1)))
    with ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"], shares="auto") as engine:
        for _ in range(3):  # a step that fails teaches nothing
            with pytest.raises(Fails):
                engine.forward_backward(rows_by_device(engine), criterion=fails)
        assert engine.shares == (1.0, 1.0)
        for _ in range(3):
            engine.forward_backward(rows_by_device(engine), criterion=lambda out, _: out.mean())
        assert engine.last_step.plan.shares[0].rows == 16
        before = engine.shares
        with torch.no_grad():
            engine.eval()(rows_by_device(engine))
        assert engine.shares == before  # nor does inference
