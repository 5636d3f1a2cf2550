"""What the null CUDA counted and recorded, for Python."""

from __future__ import annotations

import ctypes
from collections import Counter
from functools import cache
from itertools import count, takewhile
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


class _Record(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "source", "bytes")),
        ("name", ctypes.c_char_p),
        *((n, ctypes.c_int32) for n in ("thread", "kind", "device", "stream", "flags")),
    ]


@cache
def runtime() -> ctypes.CDLL:
    """The library; an ``AttributeError`` of its functions where the runtime is another
    one.
    """
    library = ctypes.CDLL(
        f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    )
    library.null_kind.restype = ctypes.c_char_p
    for function in (library.null_count, library.null_bytes, library.null_shadow):
        function.restype = ctypes.c_uint64
    library.null_records.restype = ctypes.POINTER(_Record)
    place = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64
    library.null_access.argtypes = [
        ctypes.c_char_p,
        *place,
        ctypes.c_uint64,
        ctypes.c_int,
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
    return [
        name.decode() for name in takewhile(bool, map(runtime().null_kind, count()))
    ]


def reset() -> None:
    """Count from zero again."""
    runtime().null_reset()


def counts(device: int) -> Counter[str]:
    """How often each thing happened on a device since ``reset``."""
    return Counter(
        {kind: runtime().null_count(i, device) for i, kind in enumerate(kinds())}
    )


def moved(device: int) -> Counter[str]:
    """How many bytes each kind of thing was about."""
    return Counter(
        {kind: runtime().null_bytes(i, device) for i, kind in enumerate(kinds())}
    )


def has_context(device: int) -> bool:
    """Whether this process has a context on a device."""
    return bool(runtime().null_has_context(device))


def trace(on: bool) -> None:
    """Begin a new record of what happens, or end it."""
    runtime().null_trace(int(on))


def hand_over(key: int) -> None:
    """Tell the trace that whoever takes over this key later comes after what this
    thread knows.
    """
    runtime().null_hand_over(ctypes.c_uint64(key), 0)


def take_over(key: int) -> None:
    """Tell the trace that this thread comes after those that have handed
    over this key.
    """
    runtime().null_hand_over(ctypes.c_uint64(key), 1)


def busy(count: int) -> None:
    """Let each event and stream answer so many queries with "not ready"
    before it is.
    """
    runtime().null_busy(count)


def host_writes(tensor: torch.Tensor) -> None:
    """Tell the trace that the caller writes a tensor of the host's, now."""
    runtime().null_access(b"the caller", -1, None, tensor.data_ptr(), tensor.nbytes, 1)


def records() -> list[Record]:
    """What happened in the last trace, in order."""
    size, most = ctypes.c_uint64(), ctypes.c_uint64()
    found = runtime().null_records(ctypes.byref(size), ctypes.byref(most))
    if size.value > most.value:
        raise RuntimeError(
            f"{size.value:,} records, and there is room for {most.value:,}"
        )
    names = kinds()
    return [
        Record(
            names[r.kind],
            *(r.device, r.stream, r.address, r.source, r.bytes),
            *(bool(r.flags & 1), bool(r.flags & 2), r.thread, (r.name or b"").decode()),
        )
        for r in found[: size.value]
    ]
