"""What a new thread would lose of the caller's context arrives in every worker."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from functools import partial

import pytest
import torch
from harness.models import CLASSES, FEATURES, Returns, linear, mlp
from harness.oracle import assert_close, assert_step, build, randint, randn
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
LOSS = nn.CrossEntropyLoss()


def asked(
    devices, question, context=contextlib.nullcontext, *, inference=False, count=3
):
    """The answers in ``count`` workers, one call each, in a step or inference in the
    context.
    """
    answers = []

    def answer(logits, _):
        answers.append((threading.current_thread().name, question()))
        return logits

    with ScatterOnceParallel(
        build(lambda: Returns(answer)), 1, devices(count)
    ) as engine:
        engine.train(not inference)
        with context():
            engine(BATCH[0]) if inference else engine.forward_backward(*BATCH, LOSS)
    threads, found = zip(*answers, strict=True)
    assert len({*threads} - {threading.current_thread().name}) == count
    return [*found]


def of_autocast():
    names = torch.is_autocast_enabled, torch.get_autocast_dtype
    return *(name("cpu") for name in names), torch.is_autocast_cache_enabled()


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_reaches_workers_uncached(devices, dtype, cache):
    """Torch's ``parallel_apply`` loses the dtype: bfloat16 turns into float16 there.

    One cache served the process: a weight used twice was cast once or twice, as timing
    fell.
    """
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
        assert asked(devices, of_autocast) == [(True, dtype, False)] * 3
        assert torch.is_autocast_cache_enabled() is cache
    assert asked(devices, of_autocast) == [(False, torch.bfloat16, False)] * 3


def of_gradients():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext]
)
def test_evaluation_keeps_callers_mode(devices, mode):
    """With grad mode on a call has a graph in evaluation, too."""
    expected = mode is contextlib.nullcontext, mode is torch.inference_mode
    assert asked(devices, of_gradients, mode, inference=True) == [expected] * 3


def test_training_works_after_inference_mode(devices):
    """Replicas built or refreshed under inference mode must still be fit
    for training.
    """
    with torch.inference_mode():  # a module that is made there can infer
        model = mlp().eval()
        with ScatterOnceParallel(model, 2, devices(3)) as engine:
            assert_close(engine(BATCH[0]), model(BATCH[0]), "output")
    with ScatterOnceParallel(mlp(), 2, devices(3)) as engine:
        with torch.inference_mode():
            assert engine.eval()(BATCH[0]).is_inference()
        engine.train()
        assert_step(engine, *BATCH, LOSS)


def test_default_dtype_device_reach_workers(devices):
    def question():
        made = torch.empty(1)
        return torch.get_default_device().type, made.device.type, made.dtype

    assert asked(devices, question) == [("cpu", "cpu", torch.float32)] * 3
    torch.set_default_dtype(torch.float64)
    try:
        found = asked(devices, question, lambda: torch.device("meta"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [("meta", "meta", torch.float64)] * 3


@pytest.mark.parametrize("mode", [BaseTorchDispatchMode, BaseTorchFunctionMode])
def test_modes_that_replicas_lack_warn(devices, mode, recwarn):
    # a single replica computes in the caller's thread
    for device_ids in (["cpu"], devices(3)):
        assert not recwarn.list
        with ScatterOnceParallel(linear(), 2, device_ids) as engine, mode():
            assert_step(engine, *BATCH, LOSS)
    (warning,) = recwarn.list
    assert str(warning.message).startswith(
        f"{mode.__name__}: a mode sees only the thread"
    )


@pytest.mark.contract
def test_contextvars_reach_workers(devices):
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


def test_saved_tensors_hooks_reach_workers(devices):
    """Every worker packs what it saves, and unpacks it for its backward."""
    calls, replicas = (
        set(),
        [f"scatterpar replica {i}, {d}" for i, d in enumerate(devices(3))],
    )

    def noted(kind, tensor):
        calls.add((threading.current_thread().name, kind))
        return tensor.clone()

    hooks = partial(noted, "pack"), partial(noted, "unpack")
    with ScatterOnceParallel(mlp(), 2, devices(3)) as engine:
        for whole_batch in (False, True):
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                assert_step(engine, *BATCH, LOSS, whole_batch=whole_batch)
            assert calls >= {*itertools.product(replicas, ("pack", "unpack"))}
            calls.clear()
        engine.forward_backward(*BATCH, LOSS)
    assert not calls


def test_workers_share_callers_threads(devices):
    """Two cores and two workers: one thread each, or they get into each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        assert asked(devices, torch.get_num_threads, count=2) == [3, 3]
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
