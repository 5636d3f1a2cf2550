"""Whatever the sizes: hypothesis chooses batch, replicas, accumulation, dimension and loss."""

from __future__ import annotations

import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_step, build, randint, randn
from helpers.weighted import CLASS_WEIGHTS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scatterpar import ScatterOnceParallel


def device_lists(count: int) -> st.SearchStrategy[list[str]]:
    """Shared, virtual, and any mixture of replicas that share a memory and such that do not."""
    return st.lists(
        st.sampled_from(["cpu", "cpu:0", "cpu:1", "cpu:2"]), min_size=count, max_size=count
    )


@st.composite
def setups(draw):
    devices = draw(st.integers(1, 4).flatmap(device_lists))
    if draw(st.booleans()):
        return devices, {"accum": draw(st.integers(1, 6))}
    return devices, {"micro_batch_size": draw(st.integers(1, 9))}


@settings(max_examples=40)
@given(setup=setups(), rows=st.integers(1, 24), seed=st.integers(0, 99))
def test_any_mean(setup, rows, seed):
    devices, options = setup
    with ScatterOnceParallel(mlp(seed), device_ids=devices, **options) as engine:
        inputs, targets = randn(rows, FEATURES, seed=seed), randint(CLASSES, rows, seed=seed)
        assert_step(engine, inputs, targets, nn.CrossEntropyLoss())


@settings(max_examples=40)
@given(
    setup=setups(),
    targets=st.lists(st.sampled_from([0, 1, 2, 3, -100]), min_size=1, max_size=20).filter(
        lambda targets: any(target != -100 for target in targets)
    ),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_any_weighted_loss(setup, targets, weighted, smoothing, reduction):
    devices, options = setup
    criterion = nn.CrossEntropyLoss(
        CLASS_WEIGHTS if weighted else None, label_smoothing=smoothing, reduction=reduction
    )
    with ScatterOnceParallel(mlp(), device_ids=devices, **options) as engine:
        assert_step(engine, randn(len(targets), FEATURES), torch.tensor(targets), criterion)


@settings(max_examples=25)
@given(setup=setups(), rows=st.integers(1, 12), dim=st.sampled_from([0, 1, -1, -2]))
def test_any_dimension(setup, rows, dim):
    devices, options = setup

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, 3)

        def forward(self, inputs):
            return self.linear(inputs.movedim(dim, 0)).movedim(0, dim)

    inputs = randn(rows, FEATURES).movedim(0, dim)
    targets = randn(rows, 3).movedim(0, dim)
    with ScatterOnceParallel(build(Columns), device_ids=devices, dim=dim, **options) as engine:
        assert_step(engine, inputs, targets, nn.MSELoss())
