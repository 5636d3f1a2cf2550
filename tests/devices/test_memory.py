"""Errors that mean "out of memory", what they keep alive, and the host's malloc."""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from unittest import mock

import pytest
import torch

from scatterpar.devices import memory

pytestmark = pytest.mark.core

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA"),
    MemoryError(),
    RuntimeError("MPS backend out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"),
    RuntimeError("Cannot allocate memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"
    ),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `c`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"
    ),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),  # no allocator raises it
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: repr(error)[:60])
def test_out_of_memory_known_by_its_text(error):
    assert memory.is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_out_of_memory(error):
    assert not memory.is_out_of_memory(error)


def test_virtual_device_has_host_memory():
    tensor = memory.empty(3, torch.int16, torch.device("cpu:1"))
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (
        (3,),
        torch.int16,
        "cpu",
    )


class Activation:
    """Something that a local variable keeps alive."""


def failing(alive):
    activation = Activation()
    alive.append(weakref.ref(activation))
    raise RuntimeError("out of memory")


def failing_with_a_cause(alive):
    activation = Activation()
    alive.append(weakref.ref(activation))
    try:
        failing(alive)
    except RuntimeError as error:
        raise ValueError("step") from error


def test_cleared_frames_free_activations():
    alive = []
    with pytest.raises(ValueError, match="step") as caught:
        failing_with_a_cause(alive)
    assert [reference() is None for reference in alive] == [False, False]
    memory.clear_frames(caught.value)
    assert [reference() is None for reference in alive] == [True, True]


def test_circular_errors_cleared_once():
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    memory.clear_frames(first)  # ends


@pytest.mark.parametrize("is_on", [True, False])
def test_no_kernel_search_restores_flag(is_on):
    with torch.backends.cudnn.flags(benchmark=is_on):
        with memory.no_kernel_search():
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == is_on


@pytest.mark.parametrize("variable", [None, *memory._MALLOC_VARIABLES])
def test_malloc_tuned_unless_user_set_it(monkeypatch, variable):
    for name in memory._MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    libc = mock.Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    memory.tune_malloc.__wrapped__(torch.device("cpu"))
    expected = [] if variable else [mock.call(-3, 2**25), mock.call(-1, 2**30)]
    assert libc.mallopt.mock_calls == expected


def test_cache_not_emptied_during_capture(monkeypatch):
    emptied = mock.Mock()
    monkeypatch.setattr(memory, "accelerator_in_use", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", emptied)
    with memory.CAPTURE:
        thread = threading.Thread(target=memory.empty_cache)
        thread.start()
        thread.join()
    assert emptied.call_count == 0
    memory.empty_cache()
    assert emptied.call_count == 1
