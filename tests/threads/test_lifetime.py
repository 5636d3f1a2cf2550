"""Life and death of an engine: nothing stays behind, and copies, moves and crowds work."""

from __future__ import annotations

import contextvars
import copy
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
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_step, build, randint, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scatterpar.engine
from scatterpar import Replicated, ScatterOnceParallel
from scatterpar.threads.workers import Job, Workers

pytestmark = pytest.mark.core

LOSS = nn.CrossEntropyLoss()


def data(rows=12):
    return randn(rows, FEATURES), randint(CLASSES, rows)


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("scatterpar replica ")]


def step(engine, criterion=LOSS, **options):
    return engine.forward_backward(*data(), criterion, **options)


def fail(engine):
    def criterion(output, targets):
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        step(engine, criterion)


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
    "never used": lambda engine: None,
    "a step": step,
    "outputs kept": lambda engine: step(engine, return_outputs=True),
    "something replicated": lambda engine: engine.forward_backward(
        data()[0], (data()[1], Replicated(randn(3))), lambda output, both: LOSS(output, both[0])
    ),
    "inference": lambda engine: engine.eval()(data()[0]),
    "a failed step": fail,
    "an interrupted step": interrupt,
    "replicas looked at": lambda engine: engine.replicas,
    "a criterion with weights": lambda engine: step(
        engine, nn.CrossEntropyLoss(torch.ones(CLASSES, dtype=torch.float64))
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
    assert workers() == []
    model.zero_grad()
    assert in_time(lambda: count_tensors() <= tensors)


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


@pytest.mark.draws
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_data_loader_workers_fork_beside_a_live_engine(devices):
    inputs, targets = data(24)
    loader = DataLoader(
        TensorDataset(inputs, targets), 8, num_workers=2, multiprocessing_context="fork"
    )
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        for _ in range(2):
            for batch in loader:
                assert_step(engine, *batch, LOSS)


def test_a_copy_made_inside_a_step_works(devices):
    with ScatterOnceParallel(mlp(), 1, devices(2)) as engine:
        twins = []

        def criterion(output, targets):
            twins.append(copy.deepcopy(engine))
            return LOSS(output, targets)

        step(engine, criterion)
        for twin in twins:
            with twin:
                assert_step(twin, *data(), LOSS)


def test_to_another_dtype_is_followed(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        assert_step(engine, *data(), LOSS)
        inputs, targets = data()
        for dtype, relative in ((torch.float32, 1e-5), (torch.half, 1e-2), (torch.double, 1e-10)):
            engine.to(dtype)
            engine.module.zero_grad(set_to_none=True)
            assert_step(engine, inputs.to(dtype), targets, LOSS, relative=relative)


def test_to_another_device_is_refused_in_words(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        step(engine)
        engine.to("meta")
        with pytest.raises(ValueError, match=r"must be on device_ids\[0\], which is cpu.* on meta"):
            step(engine)


@pytest.mark.parametrize("used", [False, True])
def test_made_and_used_in_a_thread_that_ends(devices, used):
    made = []

    def make():
        made.append(ScatterOnceParallel(mlp(), 2, devices(2)))
        if used:
            step(made[0])

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with made[0] as engine:
        assert_step(engine, *data(), LOSS)


def test_closed_while_a_step_hands_out_its_work(devices, monkeypatch):
    """The workers' end once overtook the work: the step waited for ever."""
    engine = ScatterOnceParallel(mlp(), 2, devices(2))
    closer, started = threading.Thread(target=engine.close), Workers._started

    def closed_by_another(workers):
        queues = started(workers)
        closer.start()
        closer.join(0.2)
        return queues

    monkeypatch.setattr(Workers, "_started", closed_by_another)
    thread = threading.Thread(target=step, args=(engine,), daemon=True)
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
def when_scattered(monkeypatch, by_reference_counts_alone):
    """A list of what to call before each batch is scattered."""
    calls = []
    scatter = scatterpar.engine.scatter

    def scattering(*args):
        for call in calls:
            call()
        return scatter(*args)

    monkeypatch.setattr(scatterpar.engine, "scatter", scattering)
    return calls


class Shared(list):
    """What was computed: replicas share any object that is not a plain container."""

    def add(self, tensor):
        self.append(weakref.ref(tensor))
        return tensor

    def alive(self):
        return sum(reference() is not None for reference in self)


class RunsOut(nn.Linear):
    """Fails in a ``way``, once it has a graph, for more than so many rows."""

    def __init__(self, outputs, fail=lambda hidden: None, rows=0):
        super().__init__(FEATURES, CLASSES)
        self.outputs, self.fail, self.rows = outputs, fail, rows

    def forward(self, inputs):
        hidden = self.outputs.add(self.outputs.add(super().forward(inputs)).sigmoid())
        if len(inputs) > self.rows:
            self.fail(hidden)
        return hidden


def fail_with(kind, text=""):
    def fail(_):
        raise kind(text)  # made here: one of the closure would be in a cycle

    return fail


def fail_twice(hidden):
    try:
        fail_with(MemoryError)(hidden)
    except MemoryError as error:  # whose traceback alone has this call, and so ``hidden``
        raise RuntimeError("CUDA error: out of memory") from error


WAYS = {
    "allocator": fail_with(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 GiB"),
    "cuBLAS": fail_with(RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    "cause": fail_twice,
    "backward": lambda hidden: hidden.register_hook(fail_with(MemoryError)),
}


def of_pairs(outputs, _):
    return (outputs @ outputs.T).sigmoid().mean()


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


def test_what_an_error_held_is_gone_when_the_next_step_begins(devices, when_scattered):
    outputs, found = Shared(), []
    with ScatterOnceParallel(build(lambda: RunsOut(outputs)), 1, devices(3)) as engine:
        for _ in range(5):
            fail(engine)
            when_scattered[:] = [lambda: found.append(outputs.alive())]
            engine.forward_backward(*data(24), LOSS)
            when_scattered.clear()
    assert found == [0] * 5


USES = LIVES | {"whole batch": partial(step, whole_batch=True)}
FAILS = [(way, "a step") for way in WAYS]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("way", "use"), [*FAILS, ("allocator", "whole batch"), ("allocator", "inference")]
)
def test_an_error_of_memory_that_is_kept_keeps_no_activations(
    devices, by_reference_counts_alone, way, use, count
):
    """A notebook keeps the last error, so the next try would run out of memory, too."""
    outputs = Shared()
    model = build(lambda: RunsOut(outputs, WAYS[way]))
    with ScatterOnceParallel(model, 2, devices(count), verify=False) as engine:
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            USES[use](engine)
        assert outputs
        assert in_time(lambda: not outputs.alive())
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("whole_batch", [False, True])
def test_a_try_that_ran_out_of_memory_holds_nothing_when_the_next_is_scattered(
    devices, when_scattered, whole_batch
):
    outputs, found = Shared(), []
    when_scattered.append(lambda: found.append(outputs.alive()))
    criterion = of_pairs if whole_batch else LOSS
    model = build(lambda: RunsOut(outputs, WAYS["allocator"], rows=2))
    with (
        ScatterOnceParallel(model, "auto", devices(2)) as engine,
        pytest.warns(UserWarning, match="accum=6 is the smallest that fits"),
    ):
        engine.forward_backward(*data(24), criterion, whole_batch=whole_batch)
    assert len(found) > 2
    assert not any(found)
