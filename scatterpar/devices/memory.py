"""Device memory and host memory: allocate, free, and recognise errors of allocators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import threading
import traceback
from collections.abc import Iterator

import torch
from torch import Tensor

from scatterpar.devices.device_ids import physical

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
)
CAPTURE = threading.RLock()  # held by a thread that captures a graph, on any device


def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised 1-D tensor in the memory of ``device``."""
    return torch.empty(size, dtype=dtype, device=physical(device))


def empty_cache() -> None:
    """Free cached device memory. Does nothing while another thread captures: torch then
    refuses.
    """
    if not torch.accelerator.is_available() or not CAPTURE.acquire(blocking=False):
        return
    try:
        torch.accelerator.empty_cache()
    # torch.accelerator does not know the allocators of other backends
    except RuntimeError:
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()
    finally:
        CAPTURE.release()


@functools.cache
def tune_malloc(device: torch.device) -> None:
    """Let the host's malloc keep freed memory, unless the user has set it up.

    glibc returns large blocks to the kernel at once, so every sub-step would cause page
    faults.
    """
    is_configured = any(name in os.environ for name in _MALLOC_VARIABLES)
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc" and not is_configured:
        libc = ctypes.CDLL(None)
        # the largest that thread heaps can serve
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextlib.contextmanager
def no_kernel_search() -> Iterator[None]:
    """In the body, cuDNN searches no kernels for new sizes, although
    ``cudnn.benchmark`` is on.

    A search empties the caches of all devices. Not ``cudnn.flags()``, which switches
    TF32 on.
    """
    is_on = torch.backends.cudnn.benchmark and not torch.backends.flags_frozen()
    if is_on:
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        if is_on:
            torch.backends.cudnn.benchmark = True


# The texts of allocators and libraries in a plain RuntimeError.
_OUT_OF_MEMORY = re.compile(
    "out of memory|can(no|')t allocate "
    "memory|cudnn_status_alloc_failed|cublas_status_alloc_failed|"
    "cublas_status_not_initialized|"  # its workspace did not fit
    "unable to find an engine to execute this computation",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a known form of "out of memory".

    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    """
    is_told = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(is_told)


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the ended calls in the tracebacks of ``error`` and
    its causes.

    They refer to activations. A notebook keeps the last error, and so would keep that
    memory.
    """
    errors = [error]
    for each in errors:
        traceback.clear_frames(each.__traceback__)  # skips calls that still run
        causes = each.__cause__, each.__context__
        errors += [
            c for c in causes if c is not None and all(c is not e for e in errors)
        ]
