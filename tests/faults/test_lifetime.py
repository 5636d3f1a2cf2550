"""Life and death of an engine: nothing stays behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial

import pytest
import torch
from harness.leak_checks import count_tensors, in_time
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import assert_step, build, randint, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar.engine
from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

LOSS = nn.CrossEntropyLoss()
BATCH = randn(12, FEATURES), randint(CLASSES, 12)


def workers():
    return [
        t for t in threading.enumerate() if t.name.startswith("scatterpar replica ")
    ]


def step(engine, criterion=LOSS, **options):
    return engine.forward_backward(*BATCH, criterion, **options)


def fail(engine, at_once=True):
    """A step that fails in the criterion, or in the backward pass."""

    def boom(_):
        raise ValueError("boom")

    def criterion(output, targets):
        if at_once:
            boom(output)
        output.register_hook(boom)
        return LOSS(output, targets)

    with pytest.raises(ValueError, match="boom"):
        step(engine, criterion)


def grow(engine):
    step(engine)
    engine.module.append(nn.Identity())
    step(engine)


@torch.no_grad()
def infer(engine):
    return engine.eval()(BATCH[0])


def call(engine):
    LOSS(engine(BATCH[0]), BATCH[1]).backward()


def evaluate(engine):
    return engine.eval()(BATCH[0])


def fail_in_call(engine):
    """In the backward pass."""

    def boom(_):
        raise ValueError("boom")

    output = engine(BATCH[0])
    output.register_hook(boom)
    with pytest.raises(ValueError, match="boom"):
        output.sum().backward()


LIVES = {
    "a step": step,
    "outputs kept": partial(step, return_outputs=True),
    "inference": infer,
    "a call": call,
    "an evaluation with a graph": evaluate,
    "a failed call": fail_in_call,
    "a failed step": fail,
    "a failed backward pass": partial(fail, at_once=False),
    "a new tree": grow,
}


@pytest.mark.parametrize("life", LIVES)
def test_no_thread_tensor_or_cycle_is_left(devices, by_reference_counts_alone, life):
    """The cyclic collector is off, and finds nothing afterwards."""
    model = mlp()
    # what torch makes once, is made
    LIVES[life](ScatterOnceParallel(mlp(), 2, devices(2)))
    gc.collect()
    gc.freeze()
    tensors = count_tensors()
    engine = ScatterOnceParallel(model, 2, devices(2))
    LIVES[life](engine)
    gone = weakref.ref(engine)
    del engine
    assert in_time(lambda: gone() is None)
    for thread in workers():
        thread.join(60)
        assert not thread.is_alive()
    model.zero_grad()
    assert in_time(lambda: count_tensors() <= tensors)


@pytest.mark.draws
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_data_loader_forks_beside_engine(devices):
    how = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(TensorDataset(*BATCH), 6, **how)
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        for _ in range(2):
            for batch in loader:
                assert_step(engine, *batch, LOSS)


@pytest.mark.contract
def test_close_twice_and_before_use(devices):
    engine = ScatterOnceParallel(mlp(), 2, devices(2))
    engine.close()
    engine.close()
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        step(engine)
        engine.close()
        with pytest.raises(RuntimeError, match="this engine is closed"):
            step(engine)
    assert workers() == []


def test_engine_outlives_thread_follows_module(
    devices,
):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        thread = threading.Thread(target=step, args=(engine,))
        thread.start()
        thread.join()
        inputs, targets = BATCH
        for dtype, relative in ((torch.double, 1e-10), (torch.half, 1e-2)):
            engine.to(dtype).zero_grad()
            assert_step(engine, inputs.to(dtype), targets, LOSS, relative=relative)
        engine.to("meta")
        with pytest.raises(
            ValueError, match=r"must be on device_ids\[0\], which is cpu.* on meta"
        ):
            step(engine)


# What the workers made and the caller dropped is freed before anybody needs the memory.
# With the interpreter's lock whoever drops an object last frees it. Without it the
# thread that made it does, when it runs Python again: an idle worker, a tenth of a
# second later.


def alive(outputs):
    return sum(reference() is not None for reference in outputs)


def runs_out(outputs, fail, rows=0):
    """A linear layer that fails once it has a graph, for more than so many rows."""

    def forward(layer, inputs):
        logits = layer.linear(inputs)
        hidden = logits.sigmoid()
        outputs.extend(map(weakref.ref, (logits, hidden)))
        if len(inputs) > rows:
            fail(hidden)
        return hidden

    return build(lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES)))


def no_memory(_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def fail_twice(hidden):
    try:
        no_memory(hidden)
    # whose traceback alone has this call, and so ``hidden``
    except RuntimeError as error:
        raise RuntimeError("CUDA error: out of memory") from error


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", ["a step", "outputs kept", "inference", "a call"])
def test_call_leaves_only_what_it_returns(
    devices, by_reference_counts_alone, name, accum
):
    with ScatterOnceParallel(mlp(), accum, devices(3)) as engine:
        for _ in range(2):  # what is made once, is made
            LIVES[name](engine)
            engine.zero_grad()
        gc.collect()
        before = count_tensors()
        returned = LIVES[name](engine)
        engine.zero_grad()
        most = before + 1 + (len(returned[1]) if name == "outputs kept" else 0)
        assert in_time(lambda: count_tensors() <= most)
        del returned  # idle workers made them, and have nothing else to wake them
        assert in_time(lambda: count_tensors() <= before)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("fails", "use"),
    [
        *(
            (fails, step)
            for fails in (no_memory, fail_twice, lambda x: x.register_hook(no_memory))
        ),
        *(
            (no_memory, use)
            for use in (partial(step, whole_batch=True), LIVES["inference"])
        ),
    ],
)
def test_kept_memory_error_frees_activations(
    devices, by_reference_counts_alone, fails, use, count
):
    """A notebook keeps the last error, so the next try would run out of memory, too."""
    outputs = []
    model = runs_out(outputs, fails)
    with ScatterOnceParallel(model, 2, devices(count), verify=False) as engine:
        with pytest.raises(RuntimeError) as caught:
            use(engine)
        assert outputs
        assert in_time(lambda: not alive(outputs))
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("whole_batch", [False, True])
def test_failed_try_freed_before_next_scatter(
    devices, whole_batch, monkeypatch, by_reference_counts_alone
):
    outputs, found, scatter = [], [], scatterpar.engine.scatter

    def scattering(*args):
        found.append(alive(outputs))
        return scatter(*args)

    monkeypatch.setattr(scatterpar.engine, "scatter", scattering)
    model = runs_out(outputs, no_memory, rows=2)
    with (
        ScatterOnceParallel(model, "auto", devices(2)) as engine,
        pytest.warns(UserWarning, match="accum=3 is the smallest that fits"),
    ):
        step(engine, whole_batch=whole_batch)
    assert len(found) > 2
    assert not any(found)
