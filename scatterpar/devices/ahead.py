"""Copies to a device beside what it computes."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor

from scatterpar.devices.ledger import Ledger, passable

__all__ = ["Ahead"]


class Ahead(Ledger):
    """Copies to one device, asked for before they are needed, by the thread that computes there.

    On an accelerator they have a stream of their own. Their memory is that of the current stream,
    so a copy waits for what that stream was given before, which may still read what the memory
    held. It does not wait for what comes later, and that does not wait for it, until ``arrive``.

    Args:
        device: where the copies go.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._targets: list[Tensor] = []  # freed earlier, they would be written after their time
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._asking = threading.Lock()  # a worker that was left behind asks while others settle

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody is there to be told
            if self._targets:
                self.settle()

    def settle(self) -> None:
        """Wait until nothing that was copied is read any more."""
        super().settle()
        if self._stream is not None:
            with self._asking:
                copied = self._stream.record_event()
                targets, self._targets = self._targets, []
            copied.synchronize()  # MPS can wait for events alone
            del targets

    def copy(self, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        """A copy of ``tensor`` in the memory of ``device``, to be read once it may ``arrive``."""
        if self._stream is None or type(tensor) is not Tensor or tensor.layout != torch.strided:
            return super().copy(tensor, device, phase)
        self.count(tensor, phase)
        with self._asking:
            target = torch.empty_like(tensor, device=device)
            self._targets.append(target)
            self._stream.wait_stream(torch.accelerator.current_stream(device))
            with self._stream:
                target.copy_(passable(tensor, device), non_blocking=True)
        return target

    def arrive(self) -> None:
        """What the current stream is given from now on comes after all that was copied."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
            self._targets.clear()
