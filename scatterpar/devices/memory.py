"""Memory of devices and of the host: allocate it, free it, recognise that it has run
out.
"""

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

from scatterpar.devices.streams import accelerator_in_use
from scatterpar.devices.virtual_devices import physical

CAPTURE = threading.RLock()  # held by a thread that captures a graph, on any device

# The numbers of options in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
)

# Parts of the texts that allocators and libraries put into a plain RuntimeError.
_TEXTS_OF_FULL_MEMORY = re.compile(
    "out of memory|can(no|')t allocate memory|"
    "_alloc_failed|"  # cuBLAS, cuDNN, cuFFT, cuSOLVER
    r"cudnn_status_internal_error_\w+_allocation_failed|"  # of the device or the host
    "cublas_status_not_initialized|"  # its workspace did not fit
    "unable to find an engine to execute this computation",
    re.IGNORECASE,
)


def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised 1-D tensor in the memory of ``device``."""
    return torch.empty(size, dtype=dtype, device=physical(device))


def storage_address(tensor: Tensor) -> int:
    """Where the storage of a tensor begins, which is that of all its views."""
    return tensor.untyped_storage().data_ptr()


def num_allocated_bytes(device: torch.device) -> int:
    """The bytes that tensors have on a device; 0 if its allocator does not say."""
    if device.type == "cpu":
        return 0
    allocated = getattr(torch.get_device_module(device), "memory_allocated", None)
    return 0 if allocated is None else int(allocated(device))


def most_allocated_bytes(device: torch.device) -> int:
    """The most bytes that tensors have had on a device since the process began.

    Or since the caller has reset this peak. 0 if the device's allocator does not say.
    """
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    allocated = getattr(module, "max_memory_allocated", None)
    return 0 if allocated is None else int(allocated(device))


def is_half_full(device: torch.device) -> bool:
    """Whether tensors have had half of a device's memory or more.

    Twice as much may not fit then. False if the device does not say.
    """
    num_bytes = most_allocated_bytes(device)
    # Without tensors its module may belong to a build of torch that has no such device.
    if not num_bytes:
        return False
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return False
    _, total = module.mem_get_info(device)
    return 2 * num_bytes >= int(total)


def num_free_bytes(device: torch.device) -> int | None:
    """The bytes that new tensors can have, with those that torch has cached.

    ``None`` if the device does not say.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    names = "mem_get_info", "memory_allocated", "memory_reserved"
    if not all(hasattr(module, name) for name in names):
        return None
    free, _ = module.mem_get_info(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free + cached)


def empty_cache() -> None:
    """Free cached device memory.

    Does nothing while another thread captures a graph: torch refuses to free then.
    """
    if not accelerator_in_use():
        return
    if not CAPTURE.acquire(blocking=False):
        return
    try:
        torch.accelerator.empty_cache()
    except RuntimeError:
        # ``torch.accelerator`` does not know the allocators of other backends.
        accelerator = torch.accelerator.current_accelerator()
        torch.get_device_module(accelerator).empty_cache()
    finally:
        CAPTURE.release()


@functools.cache  # once per device is enough
def tune_malloc(device: torch.device) -> None:
    """Let the host's malloc keep freed memory, unless the user has set it up.

    glibc returns large blocks to the kernel at once, so every sub-step would cause page
    faults.
    """
    is_configured = any(name in os.environ for name in _MALLOC_VARIABLES)
    is_glibc = device.type == "cpu" and platform.libc_ver()[0] == "glibc"
    if is_glibc and not is_configured:
        # The C library that this process has loaded.
        libc = ctypes.CDLL(None)
        # The largest that thread heaps can serve.
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextlib.contextmanager
def no_kernel_search() -> Iterator[None]:
    """In the body, cuDNN searches no kernels for new sizes, even with
    ``cudnn.benchmark``.

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is a known form of "out of memory".

    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return _TEXTS_OF_FULL_MEMORY.search(str(error)) is not None


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the ended calls in the tracebacks of ``error``.

    Also in those of its causes. The variables refer to activations. A notebook keeps
    the last error, and so would keep that memory.
    """
    errors = [error]
    for linked in errors:  # the list grows while it is read
        traceback.clear_frames(linked.__traceback__)  # skips calls that still run
        for cause in (linked.__cause__, linked.__context__):
            # By identity: errors of users may compare equal.
            if cause is not None and id(cause) not in map(id, errors):
                errors.append(cause)
