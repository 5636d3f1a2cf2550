"""Copies to a device beside what it computes."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from scatterpar.devices.ledger import Ledger, passable
from scatterpar.devices.verbs import mark, on

_STAGED = 2  # parcels that may lie in the host's pinned memory at once


class Ahead(Ledger):
    """Copies to one device, asked for before they are needed, by the thread that computes there.

    What is asked for between two calls of ``depart`` is a parcel. On an accelerator parcels have a
    stream of their own, and one on each card that they come from, so that neither end's computation
    waits for them: torch puts a copy between cards on the current streams of both. Their memory is
    that of the stream which computes, so a parcel waits for what that was given before, which may
    still read what the memory held. It does not wait for what comes later, and that does not wait
    for it, until it is to ``arrive``. Memory of the host that is not pinned is staged in memory
    that is, of at most two parcels.

    Args:
        device: where the copies go.
        sources: where tensors to be copied are. What their streams were given before this is made
            comes before the copies.
    """

    def __init__(self, device: torch.device, sources: Iterable[torch.device] = ()) -> None:
        super().__init__()
        self._asked: list[tuple[Tensor, Tensor]] = []  # what to copy, and into what
        # The targets of each parcel: freed earlier, they would be written after their time.
        self._targets: dict[int, list[Tensor]] = {}
        self._copied: dict[int, torch.Event] = {}
        self._staged: deque[torch.Event] = deque(maxlen=_STAGED)
        self._asking = threading.Lock()  # a worker that was left behind asks while others settle
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._senders: list[torch.Stream] = []
        for source in sources if self._stream is not None else ():
            if source.type != "cpu" and source != device:
                sender = torch.Stream(source)
                sender.wait_stream(torch.accelerator.current_stream(source))
                self._senders.append(sender)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody is there to be told
            if self._targets:
                self.settle()

    def settle(self) -> None:
        """Wait until nothing that was copied is read any more."""
        super().settle()
        if self._stream is not None:
            device = self._stream.device
            # The device first: else torch, leaving the stream, enters the caller's own card.
            with self._asking, on(device, ()), self._stream:
                copied = mark(device)
                targets, self._targets = self._targets, {}
            copied.synchronize()  # MPS can wait for events alone
            del targets

    def copy(self, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        """A copy of ``tensor`` in the memory of ``device``, to be read once it may ``arrive``."""
        if self._stream is None or type(tensor) is not Tensor or tensor.layout != torch.strided:
            return super().copy(tensor, device, phase)
        self.count(tensor, phase)
        target = torch.empty_like(tensor, device=device)
        self._asked.append((tensor, target))
        return target

    def depart(self, number: int) -> None:
        """What was asked for since the last time sets out, as the parcel of this number."""
        if self._stream is None or not self._asked:
            return
        asked, self._asked = self._asked, []
        with self._asking, contextlib.ExitStack() as current:
            self._targets[number] = [target for _, target in asked]
            self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
            for stream in (*self._senders, self._stream):
                current.enter_context(stream)
            for tensor, target in asked:
                source = self._readable_late(passable(tensor, target.device), target)
                target.copy_(source, non_blocking=True)
            self._copied[number] = self._stream.record_event()
            self._staged.append(mark(self._stream.device))

    def _readable_late(self, tensor: Tensor, target: Tensor) -> Tensor:
        """``tensor``, or a copy of it in pinned memory; torch reuses that once it was read."""
        if tensor.device.type != "cpu":
            return tensor
        if tensor.is_pinned() and tensor.stride() == target.stride():
            return tensor
        if len(self._staged) == _STAGED:
            self._staged[0].synchronize()
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def arrive(self, number: int) -> None:
        """What the current stream is given from now on comes after the parcel of this number."""
        if self._stream is not None and number in self._copied:
            current = torch.accelerator.current_stream(self._stream.device)
            current.wait_event(self._copied.pop(number))
            self._targets.pop(number, None)
