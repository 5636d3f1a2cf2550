"""What the simulated accelerator does, and what it has done: for tests, and by the
environment.

Environment variables, each for a whole process: ``SIMULATED_ORDER``, ``late`` (the
default), ``eager``, or ``random:SEED``; ``SIMULATED_DEVICES``, how many there are, at
most 8, 4 by default.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

ORDER, DEVICES = "SIMULATED_ORDER", "SIMULATED_DEVICES"
ORDERS = ("late", "eager", "random")
_COPIES = ("whole", "dropped", "altered")
_NO_LIMIT = 2**63 - 1
_simulated = torch.ops.simulated
Body = contextlib.AbstractContextManager[None]


def obey_environment() -> None:
    """Set what the environment asks for."""
    _simulated.set_device_count(int(os.environ.get(DEVICES, "4")))
    set_order(os.environ.get(ORDER, "late"))


def set_order(order: str) -> None:
    """When queued work runs: ``late``, ``eager``, or ``random:SEED``."""
    name, _, seed = order.partition(":")
    _simulated.set_order(ORDERS.index(name), int(seed or 0))


@contextlib.contextmanager
def _changed(change: Callable[..., object], value: Any, after: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(after)


def ordered(order: str) -> Body:
    """Another order for the body; what is queued at its end stays so."""
    return _changed(set_order, order, os.environ.get(ORDER, "late"))


def broken_link(source: int, target: int, copies: str) -> Body:
    """Copies from one device to another are ``dropped`` or ``altered``."""
    return _changed(
        partial(_simulated.set_link, source, target), _COPIES.index(copies), 0
    )


def incomplete() -> Body:
    """Without float64, and without operators that MPS has not either."""
    return _changed(_simulated.set_complete, False, True)


def limited(index: int, size: int) -> Body:
    """One device has room for ``size`` bytes more than it holds now."""
    live = torch.accelerator.memory_allocated(index)
    return _changed(partial(_simulated.set_limit, index), live + size, _NO_LIMIT)


def paced(link: float, memory: float) -> Body:
    """Copies over a link, and a device's memory, move so many bytes per second; see
    ``seconds``.
    """
    return _changed(lambda pace: _simulated.set_pace(*pace), (link, memory), (0.0, 0.0))


def seconds() -> float:
    """What cards of the pace that was set would have taken for what they were given
    since.

    The host's own work takes no time, but a thread of it waits where it synchronises.
    """
    found: float = _simulated.seconds()
    return found


def fail_kernel(index: int, number: int = 1) -> None:
    """Let a kernel of one device fail, the next or a later one: at its
    synchronisation.
    """
    _simulated.fail_kernel(index, number)


def lose(index: int) -> None:
    """Let nothing work on a device, as after a kernel's assertion, until
    ``found_again`` ends.
    """
    _simulated.set_lost(index, True)


def found_again() -> Body:
    """After the body, devices that it has lost work again, which no card's process can
    do.
    """

    def find(_: object) -> None:
        for index in range(torch.accelerator.device_count()):
            _simulated.set_lost(index, False)

    return _changed(find, None, None)


class Graph:
    """What the current stream is given between two calls, as ``torch.cuda.CUDAGraph``.

    Its memory is its own: nothing that it has allocated is used again.
    """

    def __init__(self) -> None:
        self._number = 0

    def __del__(self) -> None:
        if self._number:
            _simulated.forget_graph(self._number)

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global"
    ) -> None:
        """From here on the current stream of the current device captures."""
        _simulated.capture_begin()

    def capture_end(self) -> None:
        """Until here."""
        self._device = torch.accelerator.current_device_index()
        self._number = _simulated.capture_end()

    def replay(self) -> None:
        """The current stream is given it all again."""
        _simulated.replay(self._number, self._device)


@dataclass(frozen=True)
class Counters:
    """What happened since the library was loaded, on all devices."""

    synchronizations: int  # how often the host waited for a device, for whatever reason
    blocking_copies: int  # those of them that waited for a copy
    kernels: int  # operators that were queued, copies apart
    to_device: int  # messages from the host, …
    to_host: int
    between_devices: int
    bytes_to_device: int
    bytes_to_host: int
    bytes_between_devices: int

    def __sub__(self, other: Counters) -> Counters:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counters(*(mine - others for mine, others in pairs))


def host_seconds() -> tuple[float, float]:
    """CPU seconds that went into anything but simulating: of the calling thread, and of
    all.
    """
    mine, everyone = _simulated.own_nanoseconds()
    return time.thread_time() - 1e-9 * mine, time.process_time() - 1e-9 * everyone


def counters() -> Counters:
    """The counters as they are now; take the difference of two."""
    return Counters(*_simulated.counters())
