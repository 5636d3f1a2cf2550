"""Whatever the sizes: hypothesis chooses batch, replicas, accumulation, dimension and loss.

And what outputs are made of, how tensors are cut into messages, who adds to whom.
"""

from __future__ import annotations

import collections
import math
from dataclasses import make_dataclass
from fractions import Fraction

import torch
from harness.models import CLASSES, FEATURES, Classifier, Returns
from harness.oracle import assert_close, assert_step, build, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel, gather
from scatterpar.devices.coalescing import messages, tree_rounds
from scatterpar.plan import make_plan
from scatterpar.step.reduce import sum_pairs


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


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert not actual.requires_grad
        assert actual.dtype == expected.dtype
        assert_close(actual.double(), expected.double(), "output")
    elif isinstance(expected, (dict, Record, Frozen)):
        ours, theirs = (one if isinstance(one, dict) else vars(one) for one in (actual, expected))
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


@settings(max_examples=60)
@given(setup=setups(), rows=st.integers(1, 11), wrap=OUTPUTS)
def test_any_output(setup, rows, wrap):
    """Types and rows are the module's, in inference and where the pair's outputs are gathered."""
    devices, options = setup
    inputs = randn(rows, FEATURES)
    model = build(lambda: Returns(lambda *both: (both[0], wrap(*both)))).eval()
    with torch.no_grad():
        expected = model(inputs)
        assert_same(gather(DataParallelModel(model, devices)(inputs), "cpu"), expected)
    with ScatterOnceParallel(model, device_ids=devices, **options) as engine:
        assert_same(engine(inputs), expected)


# --- arithmetic ---


@given(
    rows=st.integers(1, 1000),
    accum=st.integers(1, 16),
    shares=st.lists(st.integers(1, 100), min_size=1, max_size=6)
    | st.sampled_from([[0.1, 0.7, 0.2], [1e-3, 1, 1]]),
)
def test_any_shares(rows, accum, shares):
    """Those of one number each are those of ``test_plan.py``."""
    n = len(shares)
    plan = make_plan(rows, [torch.device("cpu")] * n, accum, shares=shares)
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


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    replicas=st.integers(1, 5),
    accum=st.integers(1, 6),
)
def test_any_window_of_batches(sizes, replicas, accum):
    """Each row once, in order; each batch divided as it would be by itself."""
    devices = [torch.device("cpu")] * replicas
    plan = make_plan(sizes, devices, accum)
    found = [span for share in plan.shares for span in share.micro_batches]
    expected, start = [], 0
    for size in sizes:
        alone = make_plan(size, devices, accum)
        spans = [span for share in alone.shares for span in share.micro_batches]
        expected += [(start + low, start + high) for low, high in spans]
        start += size
    assert sorted(found) == expected
    assert plan.rows == start
    for share in plan.shares:
        assert list(share.micro_batches) == sorted(share.micro_batches)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=8),
    most=st.integers(1, 20),
    alone=st.integers(1, 60),
)
def test_any_tensors_travel_once_in_messages_that_are_not_too_large(sizes, most, alone):
    """How a tensor is cut depends on its own size alone; large ones travel by themselves."""
    travelled = {key: [] for key in range(len(sizes))}
    for message in messages(tuple(enumerate(sizes)), most, alone):
        assert 0 < sum(message.sizes) <= most
        assert len(message.pieces) == 1 or all(sizes[p.key] < alone for p in message.pieces)
        for piece, size in zip(message.pieces, message.sizes, strict=True):
            assert piece.stop - piece.start == size
            assert piece.is_whole == (size == sizes[piece.key])
            travelled[piece.key].append((piece.start, piece.stop))
    for key, size in enumerate(sizes):
        cuts = [(start, min(start + most, size)) for start in range(0, size, most)]
        assert travelled[key] == cuts


@given(count=st.integers(1, 70))
def test_each_replica_is_added_once(count):
    left = set(range(count))
    for target, source in sum_pairs(count):
        assert target != source
        assert {target, source} <= left
        left.remove(source)
    assert left == {0}


@given(count=st.integers(1, 70))
def test_a_broadcast_takes_few_rounds(count):
    rounds = tree_rounds(count)
    for pairs in rounds:
        members = [device for pair in pairs for device in pair]
        assert len(set(members)) == len(members), "those of a round are sent at the same time"
    assert len(rounds) == math.ceil(math.log2(count))
