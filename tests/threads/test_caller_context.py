"""What a new thread would lose of the caller's context arrives in every worker."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from functools import partial

import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Returns, linear, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    randint,
    randn,
    whole_batch,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
LOSS = nn.CrossEntropyLoss()


def asked(devices, question, context=contextlib.nullcontext, *, inference=False, count=3):
    """The answers in ``count`` workers, one call each, in a step or inference in the context."""
    answers = []

    def answer(logits, _):
        answers.append((threading.current_thread().name, question()))
        return logits

    with ScatterOnceParallel(build(lambda: Returns(answer)), 1, devices(count)) as engine:
        engine.train(not inference)
        with context():
            engine(BATCH[0]) if inference else engine.forward_backward(*BATCH, LOSS)
    threads = {name for name, _ in answers}
    assert len(threads) == count
    assert threading.current_thread().name not in threads
    return [found for _, found in answers]


def of_autocast():
    names = torch.is_autocast_enabled, torch.get_autocast_dtype
    return *(name("cpu") for name in names), torch.is_autocast_cache_enabled()


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_dtype_without_its_cache(devices, dtype, cache):
    """Torch's ``parallel_apply`` loses the dtype: bfloat16 turns into float16 there."""
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
        assert asked(devices, of_autocast) == [(True, dtype, False)] * 3
        assert torch.is_autocast_cache_enabled() is cache
    assert asked(devices, of_autocast) == [(False, torch.bfloat16, False)] * 3


class Twice(nn.Module):
    """Uses a weight twice, and takes its time in between."""

    def __init__(self, region):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.region = region

    def forward(self, inputs):
        with torch.autocast("cpu", torch.bfloat16) if self.region else contextlib.nullcontext():
            hidden = self.linear(inputs).tanh()
            time.sleep(0.001 * (len(inputs) % 3))
            return self.linear(hidden).float()  # torch 2.10's MSELoss takes one dtype


@pytest.mark.parametrize("region", [False, True], ids=["outside", "inside"])
def test_autocast_gives_the_same_bits_every_time(devices, region):
    """One cache served the process: weights were cast once or twice, as timing fell."""
    model = build(lambda: Twice(region)).float()
    inputs, targets = randn(32, 64).float(), randn(32, 64, seed=2).float()
    found = set()
    with ScatterOnceParallel(model, 2, devices(3), verify=False) as engine:
        for _ in range(10):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not region):
                engine.forward_backward(inputs, targets, nn.MSELoss())
            found.add(model.linear.weight.grad.numpy().tobytes())
    assert len(found) == 1


def of_gradients():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_inference_builds_no_graph_and_is_in_the_caller_s_mode(devices, mode):
    expected = False, mode is torch.inference_mode
    assert asked(devices, of_gradients, mode, inference=True) == [expected] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_grad_is_torch_s_own_error(devices, mode):
    engine = ScatterOnceParallel(mlp(), 2, devices(3))
    with engine, nothing_changes(engine.module), mode(), pytest.raises(RuntimeError, match="grad"):
        engine.forward_backward(*BATCH, LOSS)


def test_a_module_made_in_inference_mode_can_infer(devices):
    with torch.inference_mode():
        model = mlp()
        expected = model(BATCH[0])
        with ScatterOnceParallel(model.eval(), 2, devices(3)) as engine:
            assert_close(engine(BATCH[0]), expected, "output")


def test_training_works_after_inference_mode(devices):
    """Replicas built or refreshed under inference mode must still be fit for training."""
    with ScatterOnceParallel(mlp(), 2, devices(3)) as engine:
        with torch.inference_mode():
            assert engine.eval()(BATCH[0]).is_inference()
        engine.train()
        assert_step(engine, *BATCH, LOSS)


@contextlib.contextmanager
def other_defaults():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_dtype_and_device(devices):
    def question():
        made = torch.empty(1)
        return torch.get_default_device().type, made.device.type, made.dtype

    assert asked(devices, question) == [("cpu", "cpu", torch.float32)] * 3
    assert {*asked(devices, question, other_defaults)} == {("meta", "meta", torch.float64)}


class Counts(TorchDispatchMode):
    """Counts matrix products, as torch's own counter of operations does."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


class Passes(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counts, Passes])
def test_a_mode_that_replicas_lack_is_told(devices, mode):
    told = pytest.warns(UserWarning, match=f"^{mode.__name__}: active in the caller's thread")
    with ScatterOnceParallel(linear(), 2, devices(3)) as engine, mode(), told:
        assert_step(engine, *BATCH, LOSS)


def test_a_mode_sees_what_a_single_replica_computes(recwarn):
    counts = Counts()
    with ScatterOnceParallel(linear(), 2, ["cpu"], verify=False) as engine, counts:
        engine.forward_backward(*BATCH, LOSS)
    assert counts.found == 2, "one for each sub-step"
    assert not recwarn.list


@pytest.mark.contract
def test_contextvars(devices):
    """What a worker sets stays there."""
    variable = contextvars.ContextVar("variable", default=0)

    def question():
        variable.set(variable.get() + 1)
        return variable.get()

    token = variable.set(5)
    assert asked(devices, question) == [6] * 3
    variable.reset(token)
    assert asked(devices, question) == [1] * 3
    assert variable.get() == 0


def test_saved_tensors_hooks(devices):
    """Every worker packs what it saves, and unpacks it for its backward."""
    calls = []

    def counted(name, tensor):
        calls.append(name)
        return tensor.clone()

    hooks = partial(counted, "pack"), partial(counted, "unpack")
    with ScatterOnceParallel(mlp(), 2, devices(3)) as engine:
        _, expected = whole_batch(engine.module, *BATCH, LOSS)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            engine.forward_backward(*BATCH, LOSS)
        assert calls.count("pack") >= 6 * 3
        assert "unpack" in calls
        assert_gradients(engine.module, expected)
        calls.clear()
        engine.forward_backward(*BATCH, LOSS)
    assert calls == []


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("method", ["forward_backward", "loss"])
def test_activations_in_host_memory(devices, method, joined):
    with ScatterOnceParallel(mlp(), 2, devices(3)) as engine:
        _, expected = whole_batch(engine.module, *BATCH, LOSS)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = getattr(engine, method)(*BATCH, LOSS, whole_batch=joined)
        if loss.requires_grad:
            loss.backward()  # after the body
        assert_gradients(engine.module, expected)


def test_workers_share_the_caller_s_threads(devices):
    """Two cores and two workers: one thread each, or they get into each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        assert asked(devices, torch.get_num_threads, count=2) == [3, 3]
        assert torch.get_num_threads() == 6
        seen = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [6]
    finally:
        torch.set_num_threads(before)
