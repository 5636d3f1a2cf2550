"""``buffers="batch"``: running statistics move once a step, from all
rows that it has.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from faults.state import nothing_changes
from harness.agree import LAYOUTS
from harness.oracle import build, randint, randn
from harness.pairwise import pairwise
from harness.rank_processes import Counted, run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel

ROWS = 23  # on three replicas: 8 + 8 + 7
CHANNELS, CLASSES = 4, 3
BATCH = randn(ROWS, CHANNELS, 5, 5) * 3 + 1, randint(CLASSES, ROWS)
CRITERION = nn.CrossEntropyLoss()


def assert_buffers(found, expected):
    """These buffers are the expected ones, by name."""
    found = dict(found.named_buffers()) if isinstance(found, nn.Module) else found
    for name, value in dict(expected).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13, msg=name)


class Activated(nn.BatchNorm2d):
    """A layer of a kind that calls torch's function itself."""

    def forward(self, inputs):
        self.num_batches_tracked += 1
        rest = self.weight, self.bias, True, self.momentum, self.eps
        return nn.functional.batch_norm(
            inputs, self.running_mean, self.running_var, *rest
        ).relu_()


class Net(nn.Module):
    """Its first layer sees the rows as they are; the second one is called twice."""

    def __init__(self, momentum=0.1, way="plain", first=nn.BatchNorm2d):
        super().__init__()
        self.first = first(CHANNELS, momentum=momentum)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3)
        self.twice = nn.BatchNorm2d(CHANNELS, momentum=momentum)
        self.unused = nn.BatchNorm2d(CHANNELS)
        self.frozen = nn.BatchNorm2d(CHANNELS).eval()
        self.head = nn.Linear(CHANNELS, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(()))
        self.way = way

    def middle(self, inputs):
        hidden = self.twice(self.conv(self.first(inputs)).tanh())
        return self.frozen(self.twice(input=hidden.square() + inputs[..., 1:-1, 1:-1]))

    def forward(self, inputs):
        self.calls += 1
        # a reentrant checkpoint passes gradients on to its inputs
        inputs = inputs * self.scale
        if self.way == "plain":
            hidden = self.middle(inputs)
        else:
            hidden = checkpoint(
                self.middle, inputs, use_reentrant=self.way == "reentrant"
            )
        return self.head(hidden.mean((2, 3)))


def expected_of(model, plan):
    """The statistics of a layer after one step: torch's own, given all of its inputs at
    once.
    """
    twin, seen = copy.deepcopy(model), {}

    def keep(layer, args, kwargs):
        seen.setdefault(layer, []).extend((*args, *kwargs.values()))

    for layer in (twin.first, twin.twice):
        layer.register_forward_pre_hook(keep, with_kwargs=True)
    twin.way = "plain"
    with torch.no_grad():
        for share in plan.shares:
            for start, stop in share.micro_batches:
                twin(BATCH[0][start:stop])
        for name in ("first", "twice"):
            layer = copy.deepcopy(model.get_submodule(name))
            layer(torch.cat(seen[twin.get_submodule(name)]))
            yield from layer.named_buffers(prefix=name)


@pairwise(
    quick={"layout": ["mixed"], "momentum": [0.1, None]},
    layout=["shared", "virtual", "mixed"],
    accum=[1, 2],
    momentum=[0.1, None, 1.0],
    way=["plain", "reentrant", "not reentrant"],
    whole_batch=[False, True],
    first=[nn.BatchNorm2d, Activated],
)
def test_layers_have_statistics_of_all_rows(
    layout, accum, momentum, way, whole_batch, first
):
    if first is Activated and momentum is None:
        momentum = 0.3
    model = build(lambda: Net(momentum, way, first))
    tensors = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ScatterOnceParallel(model, accum, LAYOUTS[layout], buffers="batch") as engine:
        for step in range(3):
            expected = dict(expected_of(model, engine.plan(ROWS)))
            engine.forward_backward(*BATCH, CRITERION, whole_batch=whole_batch)
            assert_buffers(model, expected)
            assert model.first.num_batches_tracked == step + 1
    for name, buffer in model.named_buffers():
        assert buffer is tensors[name], name  # written in place, and once
        if name.startswith(("unused", "frozen")):
            assert torch.equal(buffer, before[name]), name
    assert model.calls == 3 * accum  # replica 0's, as with "master"


@pytest.mark.contract
def test_first_layer_equals_plain_torch(devices):
    """Momentum may change from step to step, as schedules have it; inference moves them
    too.
    """
    model = build(Net)
    twin = copy.deepcopy(model)
    with ScatterOnceParallel(model, 4, devices(2), buffers="batch") as engine:
        for step in range(5):
            model.first.momentum = twin.first.momentum = 0.5 / (step + 1)
            if step == 4:
                with torch.no_grad():
                    engine(BATCH[0])
            else:
                engine.forward_backward(*BATCH, CRITERION)
            twin(BATCH[0])
            assert_buffers(model.first, twin.first.named_buffers())


def test_failed_step_leaves_statistics(devices):
    model, calls = build(Net), itertools.count(-3)

    def fails(outputs, targets):
        return CRITERION(outputs, targets) + 0 / next(calls)

    with ScatterOnceParallel(
        model, 3, devices(2), buffers="batch", verify=False
    ) as engine:
        with nothing_changes(model), pytest.raises(ZeroDivisionError):
            engine.forward_backward(*BATCH, fails)
        expected = dict(expected_of(model, engine.plan(ROWS)))
        engine.forward_backward(*BATCH, CRITERION)
    assert_buffers(model, expected)


def on_ranks(group, split):
    model = build(Net)
    mine = [part.split(split)[group.rank()] for part in BATCH]
    options = {"buffers": "batch", "process_group": group}
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, **options) as engine:
        for _ in range(2):
            with Counted() as collectives:
                engine.forward_backward(*mine, CRITERION)
    return dict(model.named_buffers()), len(collectives)


@pytest.mark.slow
def test_rows_of_all_ranks_pooled():
    """In the collectives that are there: the small one, the gradients, the buffers as
    bytes.
    """
    results = run_on_ranks(2, on_ranks, [15, 8])
    twin = build(Net)
    for _ in range(2):
        twin(BATCH[0])
    for found, collectives in results:
        assert_buffers(found, twin.first.named_buffers(prefix="first"))
        for name, buffer in found.items():
            assert torch.equal(buffer, results[0][0][name]), (
                f"{name} differs between ranks"
            )
        assert collectives == 3
