"""Micro-batches by cost: rows of like length together, and everything in the user's
order.
"""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch
from harness.batches import LABELS, LENGTHS, TEXTS, Reader, pad
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_close, build, gradients, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scatterpar import Rows, ScatterOnceParallel

LOSS = nn.CrossEntropyLoss()


def engine_of(model, device_ids, budget=10, **options):
    return ScatterOnceParallel(
        model, device_ids=device_ids, micro_batch_cost=budget, **options
    )


def pieces_of(plan):
    return [
        [[*plan.rows_of(share.replica, k)] for k in range(len(share.micro_batches))]
        for share in plan.shares
    ]


def plan_of(costs, replicas, budget, **options):
    with engine_of(nn.Identity(), ["cpu"] * replicas, budget, **options) as engine:
        return engine.plan(len(costs), costs=costs)


costs_of_rows = st.lists(st.integers(0, 50) | st.floats(0, 50), min_size=1, max_size=40)


@given(costs_of_rows, st.integers(1, 4), st.floats(0.5, 200))
def test_each_row_once_within_the_budget(costs, replicas, budget):
    plan = plan_of(costs, replicas, budget)
    pieces = pieces_of(plan)
    rows = [row for own in pieces for piece in own for row in piece]
    assert sorted(rows) == [*range(len(costs))]
    assert len(pieces) == min(replicas, len(costs))
    assert all(own and all(own) for own in pieces)
    for piece in itertools.chain(*pieces):
        assert piece == sorted(piece)
        assert (
            len(piece) == 1 or len(piece) * max(costs[row] for row in piece) <= budget
        )


def test_like_costs_together_loads_even():
    generator = torch.Generator().manual_seed(0)
    lengths = (
        torch.empty(256).log_normal_(4.3, 0.8, generator=generator).clamp(8, 512).long()
    )
    for replicas in (1, 2, 3, 4):
        plan = plan_of(lengths, replicas, 4096)
        loads = [plan.load_of(share) for share in plan.shares]
        assert sum(loads) < 1.3 * lengths.sum()
        assert max(loads) < 1.05 * sum(loads) / replicas
        counts = [len(share.micro_batches) for share in plan.shares]
        assert sum(counts) % replicas == 0
        assert (
            sum(counts) <= math.ceil(1.3 * lengths.sum() / 4096 / replicas) * replicas
        )


def test_loads_in_proportion_to_shares():
    plan = plan_of([1 + i % 7 for i in range(400)], 2, 40, shares=[3, 1])
    first, second = map(plan.load_of, plan.shares)
    assert 2.8 < first / second < 3.2


@pytest.mark.parametrize(
    "make", [list, tuple, torch.tensor, numpy.array, numpy.float32]
)
def test_costs_may_be_list_tensor_or_array(make):
    assert pieces_of(plan_of(make(LENGTHS), 2, 10)) == pieces_of(
        plan_of(LENGTHS, 2, 10)
    )


def test_plan_prints_rows_costs_loads():
    text = str(plan_of([1, 4, 1, 3, 2, 1, 3], 2, 6))
    assert text.splitlines() == [
        "7 rows on 2 replicas, by cost: 15, with padding 17 (13.3% more)",
        "replica  device  rows  cost  padded  load   sub-steps  rows of each",
        "0        cpu     3     10    10      58.8%  2          [3, 6] + [1]",
        "1        cpu     4     5     7       41.2%  2          [0, 2, 4] + [5]",
    ]
    assert max(map(len, str(plan_of(range(1, 300), 2, 999)).splitlines())) < 150


@pytest.mark.contract
def test_outputs_in_order_of_the_batch(devices):
    model = build(Reader)
    with engine_of(model, devices(2)) as engine:
        args = Rows(TEXTS, pad), LABELS, LOSS
        keep = {"costs": LENGTHS, "return_outputs": True}
        for whole in (False, True):
            _, (output,) = engine.forward_backward(*args, **keep, whole_batch=whole)
            assert_close(output, model(pad(TEXTS)).detach(), "outputs")
            assert engine.last_step.plan == engine.plan(11, costs=LENGTHS)
        keep["return_outputs"] = lambda output: {
            "first": output[:, 0],
            "mean": output.mean(),
        }
        _, (found,) = engine.forward_backward(*args, **keep)
        assert_close(found["first"], model(pad(TEXTS)).detach()[:, 0], "outputs")
        assert_close(found["mean"], model(pad(TEXTS)).detach().mean(), "mean")


def test_inference_keeps_order_of_rows(devices):
    """Outputs of several kinds: two entries per row, one per row in a
    list, and none.
    """

    def forward(m, rows, names):
        logits = m.linear(rows)
        return {
            "two": logits.reshape(-1, 2),
            "names": [n.upper() for n in names],
            "b": m.book,
        }

    model = Of(forward, linear=linear(), book=nn.Buffer(torch.arange(4.0))).eval()
    rows, names = randn(7, FEATURES), Rows([*"abcdefg"])
    for replicas in (1, 2):
        with engine_of(model, devices(replicas)) as engine:
            found = engine(rows, names, costs=[3, 1, 2, 9, 4, 1, 7])
            assert_close(
                found["two"], model(rows, names.entries)["two"].detach(), "two"
            )
            assert found["names"] == [*"ABCDEFG"]
            assert torch.equal(found["b"], model.book)


def test_module_may_take_costs_argument(devices):
    model = Of(
        lambda model, rows, costs: model.layer(rows) * costs, layer=linear()
    ).eval()
    rows, costs = randn(7, FEATURES), randn(7, 1, seed=3)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_close(engine(rows, costs=costs), model(rows, costs).detach(), "output")


@pytest.mark.draws
def test_same_bits_on_any_layout():
    def step(device_ids):
        model = build(
            lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))
        )
        torch.manual_seed(3)
        with ScatterOnceParallel(
            model, device_ids=device_ids, micro_batch_cost=8
        ) as engine:
            engine.forward_backward(randn(11, FEATURES), LABELS, LOSS, costs=LENGTHS)
        return gradients(model)

    first, *others = (
        step([f"cpu:{i}" for i in layout]) for layout in ("0000", "0123", "0011")
    )
    for other in others:
        assert all(torch.equal(g, first[name]) for name, g in other.items())
