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
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
    unpack,
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
        packed: list[_PlacedPiece[_Key]] = []
        for piece in cut_into_pieces(flat[0], len(devices), coalescing.CHUNK_BYTES):
            placed = piece, [piece.of(of_device) for of_device in flat]
            self._pieces.append(placed)
            # A part of one tensor needs no buffer.
            if len(piece.parts) > 1:
                packed.append(placed)
        self._layout = _Layout(packed)

    def send(self, transfers: Transfers, phase: str) -> None:
        """Copy the values that the first device has now."""
        devices = self._devices
        buffers = _PieceBuffers(self._layout, devices)
        with Lanes(devices, transfers, phase) as lanes:
            for piece, parts in self._pieces:
                if len(piece.parts) > 1:
                    buffers.send(piece, parts[0], lanes)
                    continue
                places = [part for (part,) in parts]
                links = pairwise(zip(devices, places, strict=True))
                for (sender, source), (receiver, target) in links:
                    lanes.send(source, sender, target, receiver)
                    lanes.send_arrived(receiver)


@dataclass
class _PackedRun:
    """Packed pieces of one dtype that lie in the buffers without a gap.

    Attributes:
        dtype: of the elements.
        start: the byte in the buffers where the first piece begins.
        stop: the byte where the last piece ends.
        sizes: the number of elements of each part of these pieces.
        parts: these parts on each device.
    """

    dtype: torch.dtype
    start: int
    stop: int
    sizes: list[int]
    parts: list[list[Tensor]]


class _Layout(Generic[_Key]):
    """Where packed pieces lie in the memory of a device's buffers.

    ::

        buffer     0          1          2
        round 0    piece 0    piece 1    piece 2    unpacked together
        round 1    piece 3    piece 4               unpacked together

    Buffers of several rounds are equal. Those of a single round are as large as their
    pieces, so that there is no gap.

    Attributes:
        starts: the byte where each buffer begins.
        num_bytes: those of all buffers.
        num_pieces: the number of pieces.
        rounds: the runs of each round. A device unpacks each run in one call.
    """

    def __init__(self, packed: Sequence[_PlacedPiece[_Key]]) -> None:
        pieces = [piece for piece, _ in packed]
        size = buffer_bytes(pieces) if pieces else 1
        # At least two: a piece may arrive while the one before is sent on.
        in_memory = MESSAGES_IN_BUFFERS * coalescing.CHUNK_BYTES // size
        count = min(len(packed), max(MESSAGES_IN_BUFFERS, in_memory))
        sizes = [size] * count
        if count == len(packed):
            sizes = [buffer_bytes([piece]) for piece in pieces]
        self.starts = [0, *accumulate(sizes)]
        self.num_bytes = self.starts.pop()
        self.num_pieces = len(packed)
        self.rounds: list[list[_PackedRun]] = []
        for number, (piece, parts) in enumerate(packed):
            buffer = number % count
            if not buffer:
                self.rounds.append([])
            self._add(piece, parts, self.starts[buffer])

    def _add(
        self, piece: Piece[_Key], parts: Sequence[list[Tensor]], start: int
    ) -> None:
        """Add a piece to the last run, or begin one."""
        runs = self.rounds[-1]
        if not runs or (runs[-1].dtype, runs[-1].stop) != (piece.dtype, start):
            runs.append(_PackedRun(piece.dtype, start, start, [], [[] for _ in parts]))
        run = runs[-1]
        run.stop = start + piece.nbytes
        run.sizes += piece.sizes
        for of_device, more in zip(run.parts, parts, strict=True):
            of_device += more


class _PieceBuffers(Generic[_Key]):
    """The same buffers on all devices, for pieces that are packed.

    ::

        buffer 0    packed, sent to all        unpacked
        buffer 1    packed, sent to all        unpacked
        buffer 0                               packed, sent to all

    They are unpacked together, when all are full, because that takes few launches.
    """

    def __init__(self, layout: _Layout[_Key], devices: Sequence[torch.device]) -> None:
        self._layout = layout
        self._devices = devices
        self._memories: list[Tensor] = []
        for device in devices:
            self._memories.append(memory.empty(layout.num_bytes, torch.uint8, device))
        # By number of the buffer: when each device has sent it on.
        self._sent: list[dict[torch.device, torch.Event | None]] = []
        for _ in layout.starts:
            self._sent.append({})
        self._num_sent = 0  # pieces

    def send(self, piece: Piece[_Key], parts: list[Tensor], lanes: Lanes) -> None:
        """Pack the next piece on the first device, and send it to all others.

        ``parts`` are those of the first device. The others unpack it with the last
        piece of its round.
        """
        layout = self._layout
        turn, number = divmod(self._num_sent, len(layout.starts))
        start = layout.starts[number]
        places = [piece.in_buffer(buffer[start:]) for buffer in self._memories]
        lanes.use_departing(self._devices[0])
        piece.pack(parts, places[0])
        sent = self._sent[number]
        links = pairwise(zip(self._devices, places, strict=True))
        for (sender, source), (receiver, target) in links:
            # The piece before may not have left the buffer.
            lanes.receive_after(sent.get(receiver), receiver)
            lanes.send(source, sender, target, receiver)
            sent[sender] = lanes.sent(sender)
            lanes.send_arrived(receiver)
        self._num_sent += 1
        is_last = self._num_sent == layout.num_pieces
        if is_last or number == len(layout.starts) - 1:
            self._unpack(layout.rounds[turn], lanes)

    def _unpack(self, runs: Sequence[_PackedRun], lanes: Lanes) -> None:
        """Copy the pieces of a round to the tensors of the receivers."""
        for receiver in range(1, len(self._devices)):
            lanes.use_arriving(self._devices[receiver])
            for run in runs:
                packed = self._memories[receiver][run.start : run.stop]
                unpack(packed.view(run.dtype), run.sizes, run.parts[receiver])
