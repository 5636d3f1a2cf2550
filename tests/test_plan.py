"""plan(): rows to shares to micro-batches, as evenly as possible, in order, none empty."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import assert_step, build, randint, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scatterpar import Plan, ScatterOnceParallel


def engine_on(replicas, **options):
    return ScatterOnceParallel(torch.nn.Identity(), device_ids=["cpu"] * replicas, **options)


def sizes(plan):
    return [share.rows for share in plan.shares]


def spans(share):
    return [stop - start for start, stop in share.micro_batches]


@pytest.mark.contract
@given(
    rows=st.integers(1, 500),
    replicas=st.integers(1, 9),
    accum=st.integers(1, 20),
    micro_batch_size=st.none() | st.integers(1, 60),
)
def test_every_plan(rows, replicas, accum, micro_batch_size):
    options = {"micro_batch_size": micro_batch_size} if micro_batch_size else {"accum": accum}
    plan = engine_on(replicas, **options).plan(rows)
    assert plan.rows == rows
    assert len(plan.shares) == min(rows, replicas)
    assert [share.replica for share in plan.shares] == list(range(len(plan.shares)))
    assert max(sizes(plan)) - min(sizes(plan)) <= 1
    assert sizes(plan) == sorted(sizes(plan), reverse=True)
    position = 0
    for share in plan.shares:
        assert share.start == position
        for start, stop in share.micro_batches:
            assert start == position
            assert stop > start
            position = stop
        assert share.stop == position
        assert max(spans(share)) - min(spans(share)) <= 1
        if micro_batch_size:
            assert len(share.micro_batches) == -(-share.rows // micro_batch_size)
        else:
            assert len(share.micro_batches) == min(accum, share.rows)
    assert position == rows


def test_a_plan_is_pure_arithmetic():
    engine = engine_on(4)
    assert engine.plan(10**12).shares[3].stop == 10**12
    assert engine.plan(9) == engine.plan(9)
    assert isinstance(engine.plan(9), Plan)
    assert engine.last_step is None


def test_a_plan_prints_as_a_table():
    engine = ScatterOnceParallel(torch.nn.Identity(), 2, ["cpu:0", "cpu:1"])
    assert str(engine.plan(9)).splitlines() == [
        "9 rows on 2 replicas",
        "replica  device  rows  micro-batches",
        "0        cpu:0   0:5   1 x 3 + 1 x 2",
        "1        cpu:1   5:9   2 x 2",
    ]


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize(
    ("shares", "substeps"),
    [(None, (6, 5, 5, 15)), ([3, 1], (6, 6, 6, 5, 8))],
)
def test_each_replica_may_have_a_micro_batch_size_of_its_own(
    devices, shares, substeps, whole_batch
):
    model, batch = build(lambda: nn.Linear(4, 3)), (randn(31, 4), randint(3, 31))
    options = {"device_ids": devices(2), "micro_batch_size": [6, 24], "shares": shares}
    with ScatterOnceParallel(model, **options) as engine:
        assert engine.plan(31).substep_rows == substeps
        assert engine.plan(1).substep_rows == (1,)
        assert_step(engine, *batch, nn.CrossEntropyLoss(), whole_batch=whole_batch)


def test_equal_lists_of_micro_batch_sizes_give_the_same_bits_on_any_layout():
    found = []
    for layout in (["cpu:0", "cpu:1"], ["cpu:0", "cpu:0"]):
        model = build(lambda: nn.Linear(4, 3))
        with ScatterOnceParallel(model, device_ids=layout, micro_batch_size=[6, 24]) as engine:
            engine.forward_backward(randn(31, 4), randint(3, 31), nn.CrossEntropyLoss())
        found.append(model.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("sizes", [[3], [3, 8, 8], [3, 0], [3, 2.5], [3, True], []])
def test_micro_batch_sizes_that_do_not_fit_the_replicas_are_refused(sizes):
    with pytest.raises(ValueError, match="one int of at least 1 for each of the 2 replicas"):
        ScatterOnceParallel(nn.ReLU(), device_ids=["cpu"] * 2, micro_batch_size=sizes)


@pytest.mark.parametrize("other", [{"accum": 2}, {"accum": "auto"}, {"micro_batch_cost": 64}])
def test_micro_batch_sizes_and_another_cut_are_refused(other):
    with pytest.raises(ValueError, match="both say how a share is cut"):
        ScatterOnceParallel(nn.ReLU(), device_ids=["cpu"] * 2, micro_batch_size=[3, 8], **other)
