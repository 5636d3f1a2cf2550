"""plan(): rows to shares to micro-batches, as evenly as possible, in
order, none empty.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from harness.models import CLASSES, FEATURES, linear
from harness.oracle import assert_step, randint, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scatterpar import Plan, ScatterOnceParallel
from scatterpar.plan import make_plan

CPU = torch.device("cpu")


def engine_on(replicas, **options):
    return ScatterOnceParallel(nn.Identity(), device_ids=["cpu"] * replicas, **options)


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
def test_every_plan_is_even_and_complete(rows, replicas, accum, micro_batch_size):
    options = (
        {"micro_batch_size": micro_batch_size} if micro_batch_size else {"accum": accum}
    )
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


def test_plan_is_pure_arithmetic():
    engine = engine_on(4)
    assert engine.plan(10**12).shares[3].stop == 10**12
    assert engine.plan(9) == engine.plan(9)
    assert isinstance(engine.plan(9), Plan)
    assert engine.last_step is None


def test_plan_prints_as_a_table():
    plan = ScatterOnceParallel(nn.ReLU(), 2, ["cpu:0", "cpu:1"]).plan(9)
    assert str(plan).splitlines() == [
        "9 rows on 2 replicas",
        "replica  device  rows  micro-batches",
        "0        cpu:0   0:5   1 x 3 + 1 x 2",
        "1        cpu:1   5:9   2 x 2",
    ]


def test_ipython_shows_what_print_does():
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    engine = ScatterOnceParallel(linear(), device_ids=["cpu"] * 2)
    step = randn(8, FEATURES), randint(CLASSES, 8), nn.functional.cross_entropy
    engine.forward_backward(*step)
    check = engine.check(*step)
    for result in (make_plan(9, [CPU]), engine.last_step, check):
        assert pretty(result) == str(result)


@pytest.mark.parametrize(
    ("shares", "substeps"), [(None, (6, 5, 5, 15)), ([3, 1], (6, 6, 6, 5, 8))]
)
def test_micro_batch_size_per_replica(devices, shares, substeps):
    batch = randn(31, FEATURES), randint(CLASSES, 31)
    options = {"device_ids": devices(2), "micro_batch_size": [6, 24], "shares": shares}
    with ScatterOnceParallel(linear(), **options) as engine:
        assert engine.plan(31).substep_rows == substeps
        assert engine.plan(1).substep_rows == (1,)
        assert_step(engine, *batch, nn.CrossEntropyLoss())


@given(
    rows=st.integers(1, 1000),
    accum=st.integers(1, 16),
    shares=st.lists(st.integers(1, 100), min_size=1, max_size=6)
    | st.sampled_from([[0.1, 0.7, 0.2], [1e-3, 1, 1]]),
)
def test_any_shares_are_kept(rows, accum, shares):
    n = len(shares)
    plan = make_plan(rows, [CPU] * n, accum, shares=shares)
    parts = [Fraction(share) / sum(map(Fraction, shares)) for share in shares]
    assert [share.replica for share in plan.shares] == list(range(min(n, rows)))
    ends = [0, *(share.stop for share in plan.shares)]
    assert [share.start for share in plan.shares] == ends[:-1]
    assert ends[-1] == rows
    assert all(share.rows >= 1 for share in plan.shares)
    if rows >= n and min(parts) * rows >= 1:
        for share, part in zip(plan.shares, parts, strict=True):
            assert abs(share.rows - rows * part) < 1
    for share, part in zip(plan.shares, parts, strict=False):
        assert len(share.micro_batches) <= math.ceil(accum * n * part)
        largest = max(stop - start for start, stop in share.micro_batches)
        assert largest <= math.ceil(Fraction(rows, accum * n))


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
def test_rounded_shares_add_no_sub_step(shares, accum, substeps):
    """A float's 0.3 of 0.3 + 0.7 is more than three tenths: ten times that was cut into
    four.
    """
    plan = make_plan(1000, [CPU] * 2, accum, shares=shares)
    assert [len(share.micro_batches) for share in plan.shares] == substeps
    largest = max(b - a for share in plan.shares for a, b in share.micro_batches)
    assert largest <= math.ceil(1000 / (2 * accum))


@pytest.mark.contract
@pytest.mark.parametrize("rows", [2, 7, 37])
def test_unequal_shares_are_exact(devices, rows):
    batch = randn(rows, FEATURES), randint(CLASSES, rows)
    with ScatterOnceParallel(linear(), 3, devices(3), shares=[5, 1, 2]) as engine:
        assert_step(engine, *batch, nn.CrossEntropyLoss())
        assert engine.shares == (5, 1, 2)
        assert engine.last_step.plan == engine.plan(rows)


def test_plan_says_where_its_rows_are():
    plan = make_plan(9, [CPU] * 2, 2)
    assert [[*plan.rows_of(0, n)] for n in (0, 1)] == [[0, 1, 2], [3, 4]]
    assert [[*plan.rows_of(1, n)] for n in (0, 1)] == [[5, 6], [7, 8]]
    plan = make_plan([5, 3], [CPU] * 2, 2)
    first, second = plan.shares
    assert first.micro_batches == ((0, 2), (2, 3), (5, 6), (6, 7))
    assert first.spans == ((0, 3), (5, 7))
    assert (first.start, first.stop, first.rows) == (0, 7, 5)
    assert second.spans == ((3, 5), (7, 8))
    assert "0:3, 5:7" in str(plan)
