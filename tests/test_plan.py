"""plan(): rows to shares to micro-batches, as evenly as possible, in order, none empty."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from scatterpar import Plan, ScatterOnceParallel


def engine_on(replicas, **options):
    return ScatterOnceParallel(torch.nn.Identity(), device_ids=["cpu"] * replicas, **options)


def sizes(plan):
    return [share.rows for share in plan.shares]


def spans(share):
    return [stop - start for start, stop in share.micro_batches]


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
