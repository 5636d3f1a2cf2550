"""Whatever the sizes: hypothesis chooses batch, replicas, accumulation, dimension and loss.

And what outputs are made of.
"""

import collections
from dataclasses import make_dataclass

import torch
from harness.models import CLASSES, FEATURES, Classifier, Returns
from harness.oracle import assert_alike, assert_step, build, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel, gather


def device_lists(count):
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


@settings(max_examples=25)
@given(setup=setups(), rows=st.integers(1, 12), dim=st.sampled_from([0, 1, -1, -2]))
def test_any_dimension(setup, rows, dim):
    devices, options = setup

    class Moved(Classifier):
        def forward(self, inputs):
            return self.linear(inputs.movedim(dim, 0)).movedim(0, dim)

    inputs, targets = (randn(rows, n).movedim(0, dim) for n in (FEATURES, CLASSES))
    with ScatterOnceParallel(build(Moved), device_ids=devices, dim=dim, **options) as engine:
        assert_step(engine, inputs, targets, nn.MSELoss())


# --- outputs of any type ---


class Pair(collections.namedtuple("Pair", "first second")):
    pass


Record = make_dataclass("Record", ["first", "second"])
Frozen = make_dataclass("Frozen", ["first"], frozen=True)


LEAVES = [
    lambda logits, inputs: logits,
    lambda logits, inputs: inputs,
    lambda logits, inputs: logits.argmax(1),
    lambda logits, inputs: logits > 0,
    lambda logits, inputs: logits.mean(),  # 0-dim: averaged over the rows
    lambda logits, inputs: None,
    lambda logits, inputs: "text",
    lambda logits, inputs: 3,
]
CONTAINERS = [
    lambda values: values,
    tuple,
    lambda values: dict(zip("abc", values, strict=False)),
    lambda values: collections.OrderedDict(zip("zya", values, strict=False)),
    lambda values: Pair(values[0], values[-1]),
    lambda values: Record(values[0], values[-1]),
    lambda values: Frozen(values[0]),
]


def contained(parts):
    """Functions of what the module computes: what it returns of that, in a container."""

    def make(container, parts):
        return lambda *values: container([part(*values) for part in parts])

    inside = st.lists(parts, min_size=1, max_size=3)
    return st.builds(make, st.sampled_from(CONTAINERS), inside)


OUTPUTS = st.recursive(st.sampled_from(LEAVES), contained, max_leaves=8)


@settings(max_examples=60)
@given(setup=setups(), rows=st.integers(1, 11), wrap=OUTPUTS)
def test_any_output(setup, rows, wrap):
    """Types and rows are the module's, in inference and where the pair's outputs are gathered."""
    devices, options = setup
    inputs = randn(rows, FEATURES)
    model = build(lambda: Returns(lambda *both: (both[0], wrap(*both)))).eval()
    with torch.no_grad():
        expected = model(inputs)
        assert_alike(gather(DataParallelModel(model, devices)(inputs), "cpu"), expected)
    with ScatterOnceParallel(model, device_ids=devices, **options) as engine:
        assert_alike(engine(inputs), expected)
