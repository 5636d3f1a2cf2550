"""How long a thread launches work, and how long its device works on it."""

from __future__ import annotations

import contextlib
import time

import torch

from scatterpar.devices.streams import has_streams, use_device

# The part of a sub-step that a device may have left when the host has launched a share,
# if it has waited for the host in each sub-step: backward passes are launched faster
# than they are computed.
_TAIL = 0.75


class DeviceClock:
    """Times of one thread and of its device, from two events; waits for nothing.

    ::

        thread   first launch ──── last launch
        device      |───────────────────────────|
                                   |── tail ────|

    Attributes:
        launching: seconds from the first launch to the last one.
    """

    # For ``__del__``, if an interrupt ends the constructor before it has an event.
    _first: torch.Event | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = _recorded(device)
        self._last: torch.Event | None = None
        self.launching = 0.0
        self._working: float | None = None
        self._start = time.perf_counter()

    def stop(self) -> None:
        """Take the time of the last launch."""
        self.launching = time.perf_counter() - self._start
        self._last = _recorded(self._device)

    def working(self) -> float | None:
        """Seconds from the first kernel to the end of the last one.

        ``None`` if the device is not done. Devices without streams are done with what a
        thread has launched.
        """
        if self._first is not None and self._last is not None:
            with use_device(self._device, ()):
                if not self._last.query():
                    return None
                self._working = self._first.elapsed_time(self._last) / 1e3
            self._free_events()
        return self.launching if self._working is None else self._working

    def _free_events(self) -> None:
        # Otherwise torch, when it frees events, enters the caller's own device.
        with use_device(self._device, ()):
            self._first = None
            self._last = None

    def __del__(self) -> None:
        if self._first is not None:
            with contextlib.suppress(Exception):  # no caller could handle an error here
                self._free_events()


def longest_tail(num_substeps: int) -> float:
    """The largest part of a share for which the host waits for a device that has
    waited for the host in each of so many sub-steps.
    """
    return _TAIL / num_substeps


def device_waited(working: float, launching: float, num_substeps: int) -> bool:
    """Whether a device had nothing left to do, except for the last sub-step, when the
    host had launched all.
    """
    return tail(working, launching) < longest_tail(num_substeps)


def tail(working: float, launching: float) -> float:
    """The part of its time for which a device works on when everything is launched."""
    return max(0.0, working - launching) / working if working else 0.0


def _recorded(device: torch.device) -> torch.Event | None:
    """An event with the time at which the device's current stream comes to it."""
    if not has_streams(device):
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
