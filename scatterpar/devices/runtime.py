"""The runtime of devices: names, streams, events, memory; copies are in ``transfers``.

A *memory* is named by a ``torch.device``. ``cpu`` is host memory. ``cpu:0``, ``cpu:1``,
… are virtual devices: separate memories in host RAM. So a machine without GPUs makes
and counts the copies that several GPUs would need. Equal devices share one memory.
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
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

DeviceLike = int | str | torch.device
HOST = torch.device("cpu")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
)

_POOL = 32  # streams that torch has for each device
_taken: dict[tuple[torch.device, Hashable], torch.Stream] = {}
_taking = threading.Lock()
CAPTURE = threading.RLock()  # held by a thread that captures a graph, on any device


def resolve(device_ids: Sequence[DeviceLike] | None) -> tuple[torch.device, ...]:
    """Turn ``device_ids`` into devices; ``None``: all accelerators, or one CPU replica
    without any.

    >>> resolve(["cpu:0", "cpu:1"])
    (device(type='cpu', index=0), device(type='cpu', index=1))
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_ids is None:
        count = 0 if accelerator is None else torch.accelerator.device_count()
        device_ids = range(count) or ["cpu"]
    if isinstance(device_ids, (str, int, torch.device)) or not isinstance(
        device_ids, Sequence
    ):
        raise TypeError(
            "device_ids must be a list with one entry per replica, got "
            f"{device_ids!r}; "
            f"for one replica pass [{device_ids!r}]"
        )
    if not device_ids:
        raise ValueError(
            "device_ids is empty; pass at least one device, or None for all of them"
        )
    return tuple(_resolve_one(entry, accelerator) for entry in device_ids)


def parse_devices(words: str | Sequence[str]) -> list[str | int]:
    """The entries of a command's ``--devices``, separated by commas or spaces.

    >>> parse_devices(["cuda:0,cuda:1", "2"])
    ['cuda:0', 'cuda:1', 2]
    """
    text = words if isinstance(words, str) else " ".join(words)
    return [
        int(name) if name.isdecimal() else name
        for name in text.replace(",", " ").split()
    ]


def _resolve_one(entry: DeviceLike, accelerator: torch.device | None) -> torch.device:
    if isinstance(entry, bool) or not isinstance(entry, (int, str, torch.device)):
        raise TypeError(
            f"device_ids: expected an int, a string or a torch.device, got {entry!r}"
        )
    if isinstance(entry, int):
        if accelerator is None:
            raise ValueError(
                f"device_ids: {entry} is the ordinal of an accelerator, and none is "
                "visible here; "
                'for CPU replicas pass strings, such as ["cpu"] * 2 or ["cpu:0", '
                '"cpu:1"]'
            )
        entry = torch.device(accelerator.type, entry)
    try:
        device = torch.device(entry)
    except RuntimeError as error:
        raise ValueError(f"device_ids: {entry!r} is not a device: {error}") from error
    if device.type == "cpu":
        return device
    kind, count = (
        accelerator.type if accelerator else "",
        torch.accelerator.device_count(),
    )
    if device.type != kind or (device.index or 0) >= count:
        visible = f"{count} {kind} devices" if kind else "no accelerator"
        raise ValueError(f"device_ids: {device} is not here (visible: {visible})")
    index = (
        torch.accelerator.current_device_index()
        if device.index is None
        else device.index
    )
    return torch.device(kind, index)


@functools.cache
def physical(device: torch.device) -> torch.device:
    """The device as torch knows it: ``cpu`` for a virtual ``cpu:i``."""
    return torch.device("cpu") if device.type == "cpu" else device


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


def max_concurrency(devices: Sequence[torch.device]) -> int:
    """How many replicas start at the same time: on the CPU one per core,
    elsewhere all.
    """
    if {device.type for device in devices} != {"cpu"}:
        return len(devices)
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return min(len(devices), cores or 1)


def is_async(device: torch.device) -> bool:
    """Whether operators on ``device`` return before they are done."""
    return device.type != "cpu"


def current_streams() -> tuple[torch.Stream, ...]:
    """The caller's current streams on all accelerators, except default ones.

    Those are current in every thread, and entering one creates a context on an unused
    device.
    """
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    streams = map(torch.accelerator.current_stream, range(count))
    return tuple(stream for stream in streams if stream.stream_id)


@contextlib.contextmanager
def use_device(device: torch.device, streams: Sequence[torch.Stream]) -> Iterator[None]:
    """In the body, ``device`` and ``streams`` are current."""
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(_duplicate(stream))
        if device.type != "cpu":
            stack.enter_context(torch.accelerator.device_index(device.index))
        yield


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether ``device`` has events, and streams other than the one of its operators.

    Not the CPU, nor MPS and some other backends: their copies are complete when the
    call returns.
    """
    if device.type == "cpu":
        return False
    try:
        with use_device(device, ()):  # else torch enters the caller's current device
            one, other = torch.Stream(device), torch.Stream(device)
            one.record_event()
    except RuntimeError:
        return False
    return bool(one != other)


def stream_for(use: Hashable, device: torch.device) -> torch.Stream | None:
    """The stream of ``device`` for one ``use``; ``None`` for a device without streams.

    torch hands out streams in turn from a pool of 32 per device: the 33rd is the first
    again. So each use keeps a stream until the process ends, which no other use has,
    nor the calling thread.
    """
    if not has_streams(device):
        return None
    with _taking:
        if (device, use) not in _taken:
            others = [
                stream for (where, _), stream in _taken.items() if where == device
            ]
            others.append(torch.accelerator.current_stream(device))
            streams = (torch.Stream(device) for _ in range(_POOL))
            _taken[device, use] = next(
                stream for stream in streams if stream not in others
            )
        return _duplicate(_taken[device, use])


def _duplicate(stream: torch.Stream) -> torch.Stream:
    """Another object for ``stream``: in torch 2.11 two threads cannot enter the same
    object.
    """
    number, index, kind = stream.stream_id, stream.device_index, stream.device_type
    return torch.Stream(stream_id=number, device_index=index, device_type=kind)


def record_event(device: torch.device) -> torch.Event:
    """An event that completes when ``device`` has done the work of its current stream
    so far.

    Waiting threads sleep, if the backend has such events, and do not keep a core busy.
    """
    module = torch.get_device_module(device.type)
    try:
        event: torch.Event = module.Event(blocking=True)
    except (AttributeError, TypeError):
        return torch.accelerator.current_stream(device).record_event()
    event.record(module.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the current stream of ``device`` is done, and raise the errors of its
    kernels.
    """
    if has_streams(device):
        event = record_event(device)
        event.synchronize()


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
