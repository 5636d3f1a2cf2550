"""Hypothesis chooses batch, replicas, accumulation, dimension, and what outputs are
made of.
"""

import collections
from dataclasses import make_dataclass

import torch
from harness.models import CLASSES, FEATURES, Of, Returns
from harness.oracle import assert_alike, assert_step, build, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel, gather

# Shared, virtual, and any mixture of replicas that share a memory and such that do not.
LAYOUTS = st.lists(
    st.sampled_from(["cpu", "cpu:0", "cpu:1", "cpu:2"]), min_size=1, max_size=4
)
CUTS = st.dictionaries(
    st.sampled_from(["accum", "micro_batch_size"]),
    st.integers(1, 6),
    min_size=1,
    max_size=1,
)


@settings(max_examples=15)
@given(
    devices=LAYOUTS,
    cut=CUTS,
    rows=st.integers(1, 12),
    dim=st.sampled_from([0, 1, -1, -2]),
)
def test_any_dimension_is_exact(devices, cut, rows, dim):
    inputs, targets = (randn(rows, n).movedim(0, dim) for n in (FEATURES, CLASSES))

    def forward(m, inputs):
        return m.linear(inputs.movedim(dim, 0)).movedim(0, dim)

    model = build(lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES)))
    with ScatterOnceParallel(model, device_ids=devices, dim=dim, **cut) as engine:
        assert_step(engine, inputs, targets, nn.MSELoss())


# --- outputs of any type ---


Pair = collections.namedtuple("Pair", "first second")
Frozen = make_dataclass("Frozen", ["first"], frozen=True)
LEAVES = [
    lambda logits, inputs: logits,
    lambda logits, inputs: inputs,
    lambda logits, inputs: logits.argmax(1),
    lambda logits, inputs: logits > 0,
    lambda logits, inputs: logits.mean(),  # 0-dim: averaged over the rows
    lambda logits, inputs: None,
    lambda logits, inputs: "text",
]
CONTAINERS = [
    lambda values: values,
    tuple,
    lambda values: dict(zip("abc", values, strict=False)),
    lambda values: Pair(values[0], values[-1]),
    lambda values: Frozen(values[0]),
]


def contained(parts):
    """Functions of what the module computes: what it returns of that, in
    a container.
    """

    def make(container, parts):
        return lambda *values: container([part(*values) for part in parts])

    return st.builds(
        make, st.sampled_from(CONTAINERS), st.lists(parts, min_size=1, max_size=3)
    )


OUTPUTS = st.recursive(st.sampled_from(LEAVES), contained, max_leaves=8)


@settings(max_examples=35)
@given(devices=LAYOUTS, cut=CUTS, rows=st.integers(1, 11), wrap=OUTPUTS)
def test_any_output_is_exact(devices, cut, rows, wrap):
    """Types and rows are the module's, in inference and where the pair's outputs are
    gathered.
    """
    inputs = randn(rows, FEATURES)
    model = build(lambda: Returns(lambda *both: (both[0], wrap(*both)))).eval()
    with torch.no_grad():
        expected = model(inputs)
        assert_alike(gather(DataParallelModel(model, devices)(inputs), "cpu"), expected)
    with (
        ScatterOnceParallel(model, device_ids=devices, **cut) as engine,
        torch.no_grad(),
    ):
        assert_alike(engine(inputs), expected)
