"""Send large lists of tensors from one device to all others, along a chain.

::

    link     1st        2nd        3rd        4th
    0 > 1    piece 0    piece 1    piece 2
    1 > 2               piece 0    piece 1    piece 2
    2 > 3                          piece 0    piece 1    ...

Each device sends each piece once, so no link carries the list more than once in a
direction. In a tree the first device sends it log2(devices) times.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from scatterpar.devices import coalescing, memory
from scatterpar.devices.lanes import Lanes
from scatterpar.devices.pieces import (
    MESSAGES_IN_BUFFERS,
    Piece,
    buffer_bytes,
    cut_into_pieces,
)
from scatterpar.devices.transfers import Transfers

_Key = TypeVar("_Key", bound=Hashable)
# A piece, and its parts on each device.
_PlacedPiece = tuple[Piece[_Key], Sequence[list[Tensor]]]


class Relay(Generic[_Key]):
    """Copies of the first device's tensors to the same ones of all other devices.

    ``flat`` has 1-D tensors per device. Of those of the first device the others may
    have more. They are cut once, and may be sent in many steps.
    """

    def __init__(
        self, flat: Sequence[Mapping[_Key, Tensor]], devices: Sequence[torch.device]
    ) -> None:
        self._devices = devices
        # Each piece with its parts on each device.
        self._pieces: list[_PlacedPiece[_Key]] = []
        for piece in cut_into_pieces(flat[0], len(devices), coalescing.CHUNK_BYTES):
            self._pieces.append((piece, [piece.of(of_device) for of_device in flat]))

    def send(self, transfers: Transfers, phase: str) -> None:
        """Copy the values that the first device has now."""
        devices = self._devices
        packed = [piece for piece, _ in self._pieces if len(piece.parts) > 1]
        buffers: _PieceBuffers[_Key] = _PieceBuffers(packed, devices)
        with Lanes(devices, transfers, phase) as lanes:
            for piece, parts in self._pieces:
                if len(piece.parts) > 1:
                    buffers.send(piece, parts, lanes)
                    continue
                # A part of one tensor needs no buffer.
                places = [part for (part,) in parts]
                links = pairwise(zip(devices, places, strict=True))
                for (sender, source), (receiver, target) in links:
                    lanes.send(source, sender, target, receiver)
                    lanes.send_arrived(receiver)
            buffers.unpack(lanes)


class _PieceBuffers(Generic[_Key]):
    """Equal buffers on all devices, for pieces that are packed.

    ::

        buffer 0    packed, sent to all        unpacked
        buffer 1    packed, sent to all        unpacked
        buffer 0                               packed, sent to all

    They are unpacked together, when all are full, because that takes few launches.
    """

    def __init__(
        self,
        packed: Sequence[Piece[_Key]],
        devices: Sequence[torch.device],
    ) -> None:
        self._devices = devices
        self._size = buffer_bytes(packed) if packed else 1
        # At least two: a piece may arrive while the one before is sent on.
        in_memory = MESSAGES_IN_BUFFERS * coalescing.CHUNK_BYTES // self._size
        self._count = min(len(packed), max(MESSAGES_IN_BUFFERS, in_memory))
        num_bytes = self._count * self._size
        self._memories = [memory.empty(num_bytes, torch.uint8, d) for d in devices]
        # By number of the buffer: when each device has sent it on.
        self._sent: list[dict[torch.device, torch.Event | None]] = []
        for _ in range(self._count):
            self._sent.append({})
        # With its memory in the buffers of all devices.
        self._full: list[tuple[_PlacedPiece[_Key], list[Tensor]]] = []

    def _places(self, piece: Piece[_Key], number: int) -> list[Tensor]:
        """The memory of a piece in the buffer of this number, on each device."""
        start = number * self._size
        return [piece.in_buffer(buffer[start:]) for buffer in self._memories]

    def send(
        self, piece: Piece[_Key], parts: Sequence[list[Tensor]], lanes: Lanes
    ) -> None:
        """Pack a piece on the first device, and send it to all others.

        ``parts`` are those of each device.
        """
        number = len(self._full)
        places = self._places(piece, number)
        lanes.use_departing(self._devices[0])
        piece.pack(parts[0], places[0])
        sent = self._sent[number]
        links = pairwise(zip(self._devices, places, strict=True))
        for (sender, source), (receiver, target) in links:
            # The piece before may not have left the buffer.
            lanes.receive_after(sent.get(receiver), receiver)
            lanes.send(source, sender, target, receiver)
            sent[sender] = lanes.sent(sender)
            lanes.send_arrived(receiver)
        self._full.append(((piece, parts), places))
        if len(self._full) == self._count:
            self.unpack(lanes)

    def unpack(self, lanes: Lanes) -> None:
        """Copy all pieces in buffers to the tensors of the receivers."""
        for receiver in range(1, len(self._devices)):
            lanes.use_arriving(self._devices[receiver])
            for (piece, parts), places in self._full:
                piece.unpack(places[receiver], parts[receiver])
        self._full = []
