"""Life and death of an engine: nothing stays behind."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import signal
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from harness.leak_checks import FREE_THREADED, count_tensors, in_time
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import assert_step, build, randint, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar.engine
from scatterpar import ScatterOnceParallel
from scatterpar.threads.workers import Job, Workers

pytestmark = pytest.mark.core

LOSS = nn.CrossEntropyLoss()
BATCH = randn(12, FEATURES), randint(CLASSES, 12)


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("scatterpar replica ")]


def step(engine, criterion=LOSS, **options):
    return engine.forward_backward(*BATCH, criterion, **options)


def fail(engine, at_once=True, **options):
    """A step that fails in the criterion, or in the backward pass."""

    def boom(_):
        raise ValueError("boom")

    def criterion(output, targets):
        if at_once:
            boom(output)
        output.register_hook(boom)
        return LOSS(output, targets)

    with pytest.raises(ValueError, match="boom"):
        step(engine, criterion, **options)


def interrupt(engine):
    """Ctrl-C while the workers compute: the caller raises, and the others end as cancelled."""
    first = threading.Lock()

    def criterion(output, targets):
        if first.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)
        return LOSS(output, targets)

    with pytest.raises(KeyboardInterrupt):
        step(engine, criterion)


def grow(engine):
    step(engine)
    engine.module.append(nn.Identity())
    step(engine)


LIVES = {
    "a step": step,
    "outputs kept": partial(step, return_outputs=True),
    "inference": lambda engine: engine.eval()(BATCH[0]),
    "a failed step": fail,
    "a failed backward pass": partial(fail, at_once=False),
    "a failed step of the whole batch": partial(fail, whole_batch=True),
    "an interrupted step": interrupt,
    "a criterion with weights": partial(
        step, criterion=nn.CrossEntropyLoss(torch.ones(CLASSES, dtype=torch.float64))
    ),
    "a new tree": grow,
}


@pytest.mark.parametrize("end", ["del", pytest.param("close", marks=pytest.mark.slow)])
@pytest.mark.parametrize("life", LIVES)
def test_no_thread_tensor_or_cycle_is_left(devices, by_reference_counts_alone, life, end):
    """The cyclic collector is off, and finds nothing afterwards."""
    model = mlp()
    LIVES[life](ScatterOnceParallel(mlp(), 2, devices(2)))  # what torch makes once, is made
    gc.collect()
    gc.freeze()
    tensors = count_tensors()
    engine = ScatterOnceParallel(model, 2, devices(2))
    LIVES[life](engine)
    if end == "close":
        engine.close()
        assert workers() == []
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
def test_data_loader_workers_fork_beside_a_live_engine(devices):
    how = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(TensorDataset(*BATCH), 6, **how)
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        for _ in range(2):
            for batch in loader:
                assert_step(engine, *batch, LOSS)


@pytest.mark.contract
def test_close_twice_and_close_before_use(devices):
    engine = ScatterOnceParallel(mlp(), 2, devices(2))
    engine.close()
    engine.close()
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        step(engine)
        engine.close()
        with pytest.raises(RuntimeError, match="this engine is closed"):
            step(engine)
    assert workers() == []


def test_an_engine_outlives_the_thread_that_used_it_and_follows_where_its_module_moves(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        thread = threading.Thread(target=step, args=(engine,))
        thread.start()
        thread.join()
        inputs, targets = BATCH
        for dtype, relative in ((torch.double, 1e-10), (torch.half, 1e-2)):
            engine.to(dtype).zero_grad()
            assert_step(engine, inputs.to(dtype), targets, LOSS, relative=relative)
        engine.to("meta")
        with pytest.raises(ValueError, match=r"must be on device_ids\[0\], which is cpu.* on meta"):
            step(engine)


def test_closed_while_a_step_hands_out_its_work(devices, monkeypatch):
    """The workers' end once overtook the work: the step waited for ever."""
    engine = ScatterOnceParallel(mlp(), 2, devices(2))
    closer, started = threading.Thread(target=engine.close), Workers._started

    def closed_by_another(workers):
        queues = started(workers)
        closer.start()
        closer.join(0.2)
        return queues

    def step_unless_closed():
        with contextlib.suppress(RuntimeError):
            step(engine)

    monkeypatch.setattr(Workers, "_started", closed_by_another)
    thread = threading.Thread(target=step_unless_closed, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    closer.join()


@pytest.mark.parametrize("lingers", [False, True])
def test_a_worker_keeps_nothing(devices, monkeypatch, lingers):
    """Outputs and context variables lived until a worker that lingers was scheduled again. Since
    Python 3.14 a thread may inherit the context variables of whoever starts it."""
    if lingers and FREE_THREADED:
        pytest.skip("there a thread must run to free what it made")
    run, ends = Job.run, threading.Event()

    def run_and_linger(job, number):
        run(job, number)
        ends.wait(60)

    class Value:
        pass

    variable, value = contextvars.ContextVar("variable"), Value()
    if lingers:
        monkeypatch.setattr(Job, "run", run_and_linger)
    with ScatterOnceParallel(mlp(), 2, devices(3), verify=False) as engine:  # a look would wait
        try:
            token = variable.set(value)
            _, outputs = step(engine, return_outputs=True)
            variable.reset(token)
            alive = [weakref.ref(made) for made in (value, *outputs)]
            del token, value, outputs
            assert in_time(lambda: [reference() for reference in alive] == [None] * 4)
        finally:
            ends.set()


# What the workers made and the caller dropped is freed before anybody needs the memory. With the
# interpreter's lock whoever drops an object last frees it. Without it the thread that made it does,
# when it runs Python again: an idle worker, a tenth of a second later.


@pytest.fixture
def alive_when_scattered(outputs, monkeypatch, by_reference_counts_alone):
    """How many outputs there are when each batch is scattered."""
    found, scatter = [], scatterpar.engine.scatter

    def scattering(*args):
        found.append(alive(outputs))
        return scatter(*args)

    monkeypatch.setattr(scatterpar.engine, "scatter", scattering)
    return found


@pytest.fixture
def outputs():
    """References to what ``runs_out`` has computed."""
    return []


def alive(outputs):
    return sum(reference() is not None for reference in outputs)


def runs_out(outputs, fail=lambda hidden: None, rows=0):
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
    except RuntimeError as error:  # whose traceback alone has this call, and so ``hidden``
        raise RuntimeError("CUDA error: out of memory") from error


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", ["a step", "outputs kept", "inference"])
def test_a_call_leaves_what_it_returns_and_no_more(devices, by_reference_counts_alone, name, accum):
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


def test_what_an_error_held_is_gone_when_the_next_step_begins(
    devices, outputs, alive_when_scattered
):
    with ScatterOnceParallel(runs_out(outputs), 1, devices(3), verify=False) as engine:
        for _ in range(5):
            fail(engine)
            step(engine)
    assert alive_when_scattered == [0] * 10


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("fails", "use"),
    [
        *((fails, step) for fails in (no_memory, fail_twice, lambda x: x.register_hook(no_memory))),
        *((no_memory, use) for use in (partial(step, whole_batch=True), LIVES["inference"])),
    ],
)
def test_an_error_of_memory_that_is_kept_keeps_no_activations(
    devices, by_reference_counts_alone, outputs, fails, use, count
):
    """A notebook keeps the last error, so the next try would run out of memory, too."""
    model = runs_out(outputs, fails)
    with ScatterOnceParallel(model, 2, devices(count), verify=False) as engine:
        with pytest.raises(RuntimeError) as caught:
            use(engine)
        assert outputs
        assert in_time(lambda: not alive(outputs))
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("whole_batch", [False, True])
def test_a_try_that_ran_out_of_memory_holds_nothing_when_the_next_is_scattered(
    devices, outputs, alive_when_scattered, whole_batch
):
    model = runs_out(outputs, no_memory, rows=2)
    with (
        ScatterOnceParallel(model, "auto", devices(2)) as engine,
        pytest.warns(UserWarning, match="accum=3 is the smallest that fits"),
    ):
        step(engine, whole_batch=whole_batch)
    assert len(alive_when_scattered) > 2
    assert not any(alive_when_scattered)
