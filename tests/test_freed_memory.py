"""What the workers made and the caller dropped is freed before anybody needs the memory.

With the interpreter's lock whoever drops an object last frees it. Without it the thread that
made it does, when it runs Python again: an idle worker, a tenth of a second later. Until then
a try that ran out of memory held its activations, beside the batch of the next one.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.freed import count_tensors, in_time
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import build, randint, randn
from torch import nn

import scatterpar.engine
from scatterpar import ScatterOnceParallel

LOSS = nn.CrossEntropyLoss()
INPUTS, TARGETS = randn(24, FEATURES), randint(CLASSES, 24)


@pytest.fixture(autouse=True)
def by_reference_counts_alone():
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def when_scattered(monkeypatch):
    """A list of what to call before each batch is scattered."""
    calls = []
    scatter = scatterpar.engine.scatter

    def scattering(*args):
        for call in calls:
            call()
        return scatter(*args)

    monkeypatch.setattr(scatterpar.engine, "scatter", scattering)
    return calls


class Watched(nn.Linear):
    """Lets others see whether its outputs are alive, and has memory for so many rows."""

    def __init__(self, outputs, rows=10**9):
        super().__init__(FEATURES, CLASSES)
        self.outputs = outputs
        self.rows = rows

    def forward(self, inputs):
        output = super().forward(inputs)
        self.outputs.append(weakref.ref(output))
        if len(inputs) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return output


class Shared(list):
    """Replicas share any object that is not a plain container."""

    def alive(self):
        return sum(reference() is not None for reference in self)


def of_pairs(outputs, _):
    return (outputs @ outputs.T).sigmoid().mean()


CALLS = {
    "a step": lambda engine: engine.forward_backward(INPUTS, TARGETS, LOSS),
    "outputs": lambda engine: engine.forward_backward(INPUTS, TARGETS, LOSS, return_outputs=True),
    "inference": lambda engine: engine.eval()(INPUTS),
}


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_what_it_returns_and_no_more(devices, name, accum):
    with ScatterOnceParallel(mlp(), accum, devices(3)) as engine:
        for _ in range(2):  # what is made once, is made
            CALLS[name](engine)
            engine.zero_grad()
        gc.collect()
        before = count_tensors()
        returned = CALLS[name](engine)
        engine.zero_grad()
        most = before + 1 + (len(returned[1]) if name == "outputs" else 0)
        assert in_time(lambda: count_tensors() <= most)
        del returned  # idle workers made them, and have nothing else to wake them
        assert in_time(lambda: count_tensors() <= before)


def test_what_an_error_held_is_gone_when_the_next_step_begins(devices, when_scattered):
    outputs, found = Shared(), []

    def fails(output, targets):
        raise ValueError("boom")

    with ScatterOnceParallel(build(lambda: Watched(outputs)), 1, devices(3)) as engine:
        for _ in range(5):
            with pytest.raises(ValueError, match="boom"):
                engine.forward_backward(INPUTS, TARGETS, fails)
            when_scattered[:] = [lambda: found.append(outputs.alive())]
            engine.forward_backward(INPUTS, TARGETS, LOSS)
            when_scattered.clear()
    assert found == [0] * 5


@pytest.mark.parametrize("whole_batch", [False, True])
def test_a_try_that_ran_out_of_memory_holds_nothing_when_the_next_is_scattered(
    devices, when_scattered, whole_batch
):
    outputs, found = Shared(), []
    when_scattered.append(lambda: found.append(outputs.alive()))
    criterion = of_pairs if whole_batch else LOSS
    model = build(lambda: Watched(outputs, rows=2))
    with (
        ScatterOnceParallel(model, "auto", devices(2)) as engine,
        pytest.warns(UserWarning, match="accum=6 is the smallest that fits"),
    ):
        engine.forward_backward(INPUTS, TARGETS, criterion, whole_batch=whole_batch)
    assert len(found) > 2
    assert not any(found)
