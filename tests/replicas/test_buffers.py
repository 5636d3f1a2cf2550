"""Buffers: replica 0's or the mean, bit for bit, and whatever else a buffer may be."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_close, assert_step, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS = 11  # on three replicas: 4 + 4 + 3
BATCH = randn(ROWS, FEATURES), randint(CLASSES, ROWS)
CRITERION = nn.CrossEntropyLoss()


def normalised():
    return build(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        )
    )


def after_share(model, rows, accum):
    """The buffers of a copy of the model that saw these rows in ``accum``
    micro-batches.
    """
    twin = copy.deepcopy(model)
    for piece in BATCH[0][rows].tensor_split(accum):
        twin(piece)
    return dict(twin.named_buffers())


def assert_buffers(model, expected):
    """Bit for bit."""
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.contract
@pytest.mark.parametrize("accum", [1, 2])
def test_master_keeps_replica_0_bit_for_bit(devices, accum):
    """On a real GPU or a virtual one: the same kernels on the same rows, so the same
    bits.
    """
    model = normalised()
    expected = after_share(model, slice(4), accum)
    held = dict(model.named_buffers())
    if accum == 2:  # 4 rows as 2 + 2, but 3 as 2 + 1, which batch normalisation refuses
        batch = tuple(part[:8] for part in BATCH)
        device_ids = devices(2)
    else:
        batch, device_ids = BATCH, devices(3)
    with ScatterOnceParallel(model, accum, device_ids) as engine:
        engine.forward_backward(*batch, CRITERION)
    assert_buffers(model, expected)
    assert all(buffer is held[name] for name, buffer in model.named_buffers()), (
        "rebound"
    )


def test_master_buffers_alias_no_inputs(devices):
    """A buffer taken from the batch must not alias it: the next batch may overwrite it
    in place.
    """

    def forward(m, inputs):
        m.last = inputs
        return m.linear(inputs)

    model = Of(forward, linear=linear(), last=nn.Buffer(torch.zeros(0, FEATURES)))
    inputs = BATCH[0].clone()
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(inputs, BATCH[1], CRITERION)
    kept = model.last.clone()
    inputs.zero_()
    assert torch.equal(model.last, kept)


@pytest.mark.parametrize("way", ["call", "map"])
@pytest.mark.parametrize("training", ["nothing", "one layer", "everything"])
def test_inference_moves_statistics(devices, training, way):
    """Under no_grad a training-mode forward is allowed (to re-estimate statistics): it
    counts.
    """
    model = normalised().train(training == "everything")
    model[1].train(training != "nothing")
    expected = after_share(model, slice(4), 1)
    with (
        ScatterOnceParallel(model, 1, devices(3)) as engine,
        torch.set_grad_enabled(training != "everything"),
    ):
        if way == "call":
            engine(BATCH[0])
        else:
            engine.map(lambda replica, inputs: replica(inputs), BATCH[0])
    assert_buffers(model, expected)


def test_buffer_written_after_other_in_graph(devices):
    """Buffers of a replica once shared one version counter, so that autograd refused
    this.
    """

    def forward(m, inputs):
        outputs = m.norm(inputs)
        m.queue.copy_(outputs.detach()[:2])
        return outputs

    parts = {
        "norm": nn.BatchNorm1d(FEATURES),
        "queue": nn.Buffer(torch.zeros(2, FEATURES)),
    }
    model = build(lambda: Of(forward, **parts))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(
            randn(8, FEATURES), criterion=lambda out, _: out.square().mean()
        )
        assert model.queue.any()


REGISTRATIONS = {
    "new": lambda module: module.register_buffer("new", torch.ones(())),
    "deleted": lambda module: delattr(module, "shown"),
    "None": lambda module: module.register_buffer("none", None),
}


@pytest.mark.parametrize("act", REGISTRATIONS)
@pytest.mark.parametrize("whole", [False, True])
def test_buffer_registered_in_forward_refused(devices, act, whole):
    """Each replica would register one of its own; a failed step once left one behind as
    None.
    """

    def forward(m, inputs):
        m.calls += 1
        if m.calls == 3:
            REGISTRATIONS[act](m)
        return m.linear(inputs)

    model = build(
        lambda: Of(forward, linear=linear(), shown=nn.Buffer(torch.ones(())), calls=0)
    )
    with ScatterOnceParallel(model, 3, devices(2), verify=False) as engine:
        with pytest.raises(
            ValueError, match=r"registers or deletes buffers \((new|shown|none)\)"
        ):
            engine.forward_backward(*BATCH, CRITERION, whole_batch=whole)
        assert [*model._buffers] == ["shown"]
        assert all(parameter.grad is None for parameter in model.parameters())
        model.calls = 9
        assert_step(engine, *BATCH, CRITERION, whole_batch=whole)


@pytest.mark.parametrize("names", [("fast", "slow"), ("fast",), ()], ids=str)
def test_buffers_that_begin_as_one_tensor(devices, names):
    """The last of both once won, since they were written into the one tensor."""

    def forward(m, inputs):
        for name in names:  # the others are written in place
            setattr(m, name, getattr(m, name) * 0.5 + ord(name[0]))
        if "slow" not in names:
            m.slow.add_(3)
        return m.linear(inputs)

    start = nn.Buffer(torch.zeros((), dtype=torch.float64))
    model = Of(forward, linear=linear(), fast=start, slow=start)
    twin = copy.deepcopy(model)
    assert twin.slow is twin.fast
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for _ in range(3):
            assert_step(engine, *BATCH, CRITERION)
            twin(BATCH[0])
            assert (model.fast is model.slow) == (twin.fast is twin.slow)
            for name in ("fast", "slow"):
                assert_close(getattr(model, name).data, getattr(twin, name).data, name)
