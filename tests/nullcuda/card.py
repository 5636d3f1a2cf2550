"""What the null CUDA counted and recorded, for Python."""

from __future__ import annotations

import ctypes
from collections import Counter
from functools import cache
from typing import NamedTuple

import torch


class Record(NamedTuple):
    """One thing that happened; ``runtime/null.h`` says what the fields mean."""

    kind: str
    device: int
    stream: int
    address: int
    source: int
    bytes: int
    blocks: bool
    pageable: bool
    thread: int
    name: str
    cpu: int = 0  # nanoseconds that the thread has computed


class _Record(ctypes.Structure):
    _fields_ = (  # as in ``runtime/null.h``
        ("address", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("cpu", ctypes.c_uint64),
        ("thread", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    )


_BLOCKS = 1  # flags of a record
_PAGEABLE = 2


@cache
def runtime() -> ctypes.CDLL:
    """The library. Raises ``AttributeError`` if the runtime is another one."""
    cuda, _, _ = (torch.version.cuda or "").partition(".")
    library = ctypes.CDLL(f"libcudart.so.{cuda}")
    library.null_kind.restype = ctypes.c_char_p
    for function in (library.null_count, library.null_bytes, library.null_shadow):
        function.restype = ctypes.c_uint64
    library.null_records.restype = ctypes.POINTER(_Record)
    library.null_access.argtypes = [
        ctypes.c_char_p,  # the operation
        ctypes.c_int,  # device
        ctypes.c_void_p,  # stream
        ctypes.c_uint64,  # address
        ctypes.c_uint64,  # bytes
        ctypes.c_int,  # whether it writes
    ]
    return library


def is_null() -> bool:
    """Whether torch's CUDA is this one."""
    try:
        return hasattr(runtime(), "null_kind")
    except (OSError, AttributeError):
        return False


@cache
def kinds() -> list[str]:
    """The names of what is counted."""
    names = []
    while name := runtime().null_kind(len(names)):
        names.append(name.decode())
    return names


def reset() -> None:
    """Count from zero again."""
    runtime().null_reset()


def counts(device: int) -> Counter[str]:
    """How often each thing happened on a device since ``reset``."""
    counter: Counter[str] = Counter()
    for number, kind in enumerate(kinds()):
        counter[kind] = runtime().null_count(number, device)
    return counter


def moved(device: int) -> Counter[str]:
    """How many bytes each kind of thing was about."""
    counter: Counter[str] = Counter()
    for number, kind in enumerate(kinds()):
        counter[kind] = runtime().null_bytes(number, device)
    return counter


def has_context(device: int) -> bool:
    """Whether this process has a context on a device."""
    return bool(runtime().null_has_context(device))


def trace(on: bool) -> None:
    """Begin a new record of what happens, or end it."""
    runtime().null_trace(int(on))


def hand_over(key: int) -> None:
    """Tell the trace that what takes over this key comes after what this thread knows."""
    runtime().null_hand_over(ctypes.c_uint64(key), 0)


def take_over(key: int) -> None:
    """Tell the trace that this thread comes after those that handed over this key."""
    runtime().null_hand_over(ctypes.c_uint64(key), 1)


def busy(count: int) -> None:
    """Let each event and stream answer so many queries with "not ready" before it is."""
    runtime().null_busy(count)


def host_writes(tensor: torch.Tensor) -> None:
    """Tell the trace that the caller writes a tensor of the host's, now."""
    runtime().null_access(b"the caller", -1, None, tensor.data_ptr(), tensor.nbytes, 1)


def records() -> list[Record]:
    """What happened in the last trace, in order."""
    size = ctypes.c_uint64()
    room = ctypes.c_uint64()
    array = runtime().null_records(ctypes.byref(size), ctypes.byref(room))
    if size.value > room.value:
        problem = f"{size.value:,} records, and there is room for {room.value:,}"
        raise RuntimeError(problem)
    return [_as_record(entry) for entry in array[: size.value]]


def _as_record(entry: _Record) -> Record:
    return Record(
        kind=kinds()[entry.kind],
        device=entry.device,
        stream=entry.stream,
        address=entry.address,
        source=entry.source,
        bytes=entry.bytes,
        blocks=bool(entry.flags & _BLOCKS),
        pageable=bool(entry.flags & _PAGEABLE),
        thread=entry.thread,
        name=(entry.name or b"").decode(),
        cpu=entry.cpu,
    )
