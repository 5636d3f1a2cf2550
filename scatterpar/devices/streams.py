"""The streams and events of devices."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Hashable, Iterator, Sequence

import torch

_POOL = 32  # streams that torch has for each device
_taken: dict[tuple[torch.device, Hashable], torch.Stream] = {}
_taking = threading.Lock()


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
