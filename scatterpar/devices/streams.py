"""Streams and events of devices; which device and streams a thread uses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence

import torch

# Streams per device: kStreamsPerPool in torch's c10/cuda/CUDAStream.cpp.
_POOL_SIZE = 32
_streams: dict[tuple[torch.device, Hashable], torch.Stream] = {}  # by device and use
_devices_with_streams: set[torch.device] = set()
# Several workers may be the first to need streams.
_streams_lock = threading.Lock()


def is_async(device: torch.device) -> bool:
    """Whether operators on ``device`` return before they are done."""
    return device.type != "cpu"


def current_streams() -> tuple[torch.Stream, ...]:
    """The caller's current streams on all accelerators, except default ones.

    Default streams are current in every thread, and entering one creates a context on
    an unused device. Nor has an accelerator others that nobody has used: to ask for its
    streams would initialise it, and a forked child could not use it any more.
    """
    if not accelerator_in_use():
        return ()
    count = torch.accelerator.device_count()
    streams = [torch.accelerator.current_stream(index) for index in range(count)]
    # A default stream has the number 0.
    return tuple(stream for stream in streams if stream.stream_id)


def accelerator_in_use() -> bool:
    """Whether this process has an accelerator, and has initialised it."""
    # Without the question whether it is available: that initialises its driver, and a
    # forked child could not use it any more.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None:  # not every backend has it
        return torch.accelerator.is_available()
    return bool(is_initialized())


def use_device(
    device: torch.device, streams: Sequence[torch.Stream]
) -> contextlib.AbstractContextManager[object]:
    """In the body, ``device`` and ``streams`` are current."""
    if streams:
        return _use_streams(device, streams)
    return _use_index(device)


@contextlib.contextmanager
def _use_streams(
    device: torch.device, streams: Sequence[torch.Stream]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(_duplicate(stream))
        # The device last: entering a stream makes its device current.
        with _use_index(device):
            yield


def _use_index(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # No generator of Python, because a step enters devices some dozens of times.
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def has_streams(device: torch.device) -> bool:
    """Whether ``device`` has events, and streams other than the one of its operators.

    Not the CPU, nor MPS and some other backends: their copies are complete when the
    call returns.
    """
    if device.type == "cpu":
        return False
    if device in _devices_with_streams:
        return True
    try:
        with use_device(device, ()):  # else torch enters the caller's current device
            first = torch.Stream(device)
            second = torch.Stream(device)
            first.record_event()
    # Nothing is remembered: a GPU without memory for its context fails, too, and has
    # streams as soon as its memory is free.
    except RuntimeError:
        return False
    if first == second:
        return False
    _devices_with_streams.add(device)
    return True


def refuse_without_events(devices: Sequence[torch.device]) -> None:
    """Raise ``ValueError`` if autograd could not wait between these devices."""
    first = devices[0]
    if len(set(devices)) > 1 and is_async(first) and not has_streams(first):
        raise ValueError(
            f"device_ids: {first} has no events, which autograd needs between devices; "
            "use one device, or forward_backward of the engine, or torch.no_grad()"
        )


def stream_for(use: Hashable, device: torch.device) -> torch.Stream | None:
    """The stream of ``device`` for one ``use``; ``None`` for a device without streams.

    torch hands out streams in turn from a pool of 32 per device: the 33rd is the first
    again. So each use keeps a stream until the process ends, which no other use has,
    nor the calling thread.
    """
    if not has_streams(device):
        return None
    key = device, use
    with _streams_lock:
        if key not in _streams:
            _streams[key] = _unused_stream(device)
        return _duplicate(_streams[key])


def _unused_stream(device: torch.device) -> torch.Stream:
    used = [stream for (owner, _), stream in _streams.items() if owner == device]
    used.append(torch.accelerator.current_stream(device))
    # One round of the pool: streams are equal if their numbers are.
    candidates = (torch.Stream(device) for _ in range(_POOL_SIZE))
    return next(stream for stream in candidates if stream not in used)


def _duplicate(stream: torch.Stream) -> torch.Stream:
    """Another object for ``stream``.

    In torch 2.11 two threads cannot enter the same object.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def record_event(device: torch.device) -> torch.Event:
    """Record an event, which completes when ``device`` has done the work of its current
    stream so far.

    Waiting threads sleep, if the backend has such events, and do not keep a core busy.
    """
    backend = torch.get_device_module(device.type)
    try:
        event: torch.Event = backend.Event(blocking=True)
    except (AttributeError, TypeError):  # a backend without such events
        return torch.accelerator.current_stream(device).record_event()
    event.record(backend.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the current stream of ``device`` is done.

    Raises the errors of its kernels.
    """
    # An event of the current stream: other streams of the device need not be done.
    if has_streams(device):
        event = record_event(device)
        event.synchronize()
