"""Two streams per device for copies between devices: one out, one in.

torch runs a copy on the current stream of its source, and lets it and the target's
current stream wait for each other. With one stream per device, what a device sends and
what it receives take turns; with two, both directions of its links are busy::

    device 1   arriving    0 > 1, piece 0   0 > 1, piece 1   0 > 1, piece 2
               departing                    1 > 2, piece 0   1 > 2, piece 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from scatterpar.devices.streams import stream_for
from scatterpar.devices.transfers import Transfers


class Lanes:
    """In the body of a ``with``, copies between ``devices`` go through their lanes.

    ::

        with Lanes(devices, transfers, "replicate") as lanes:
            lanes.send(source, devices[0], target, devices[1])
            lanes.send_arrived(devices[1])
            lanes.send(target, devices[1], other, devices[2])

    The lanes wait for what was launched on the current streams before the body, and
    what is launched after the body waits for the lanes. So memory that they use is
    allocated before the body, and kept until its end. A device without streams copies
    at once.
    """

    def __init__(
        self, devices: Sequence[torch.device], transfers: Transfers, phase: str
    ) -> None:
        self._transfers = transfers
        self._phase = phase
        self._departing: dict[torch.device, torch.Stream] = {}
        self._arriving: dict[torch.device, torch.Stream] = {}
        for device in devices:
            departing = stream_for("departing", device)
            arriving = stream_for("arriving", device)
            if departing is not None and arriving is not None:
                self._departing[device] = departing
                self._arriving[device] = arriving
        self._computing: list[torch.Stream] = []
        self._device = -1

    def __enter__(self) -> Self:
        if not self._departing:
            return self
        self._device = torch.accelerator.current_device_index()
        for device, departing in self._departing.items():
            computing = torch.accelerator.current_stream(device)
            self._computing.append(computing)
            departing.wait_stream(computing)
            self._arriving[device].wait_stream(computing)
        return self

    def __exit__(self, *_: Any) -> None:
        streams = self._departing.items()
        for computing, (device, departing) in zip(
            self._computing, streams, strict=True
        ):
            computing.wait_stream(departing)
            computing.wait_stream(self._arriving[device])
            torch.accelerator.set_stream(computing)
        if self._computing:
            # Last: to set a stream makes its device current.
            torch.accelerator.set_device_index(self._device)

    def send(
        self,
        source: Tensor,
        sender: torch.device,
        target: Tensor,
        receiver: torch.device,
    ) -> None:
        """Copy ``source`` to ``target``, out of one device's lane into the other's."""
        self.use_arriving(receiver)
        self.use_departing(sender)
        self._transfers.copy_into(target, source, self._phase)

    def use_departing(self, device: torch.device) -> None:
        """Launch on this lane what prepares a copy, until the next call."""
        if device in self._departing:
            torch.accelerator.set_stream(self._departing[device])

    def use_arriving(self, device: torch.device) -> None:
        """Launch on this lane what uses copies, until the next call."""
        if device in self._arriving:
            torch.accelerator.set_stream(self._arriving[device])

    def send_arrived(self, device: torch.device) -> None:
        """Let later copies from ``device`` wait for what has arrived and was computed
        of it.
        """
        if device in self._departing:
            self._departing[device].wait_stream(self._arriving[device])

    def sent(self, device: torch.device) -> torch.Event | None:
        """An event that completes when ``device`` has sent what was issued so far."""
        if device not in self._departing:
            return None
        return self._departing[device].record_event()

    def receive_after(self, event: torch.Event | None, device: torch.device) -> None:
        """Let later copies to ``device`` wait for an event, which ``sent`` returned."""
        if event is not None:
            self._arriving[device].wait_event(event)
