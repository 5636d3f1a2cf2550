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

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from scatterpar.devices import coalescing, memory
from scatterpar.devices.lanes import Lanes
from scatterpar.devices.pieces import MESSAGES_IN_BUFFERS, Piece, buffer_bytes, cut
from scatterpar.devices.transfers import Transfers

_Key = TypeVar("_Key", bound=Hashable)


def relay(
    flat: Sequence[Mapping[_Key, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
    phase: str,
) -> None:
    """Copy the tensors of the first device to the same ones of all others.

    ``flat`` has 1-D tensors per device.
    """
    pieces = cut(flat[0], len(devices), coalescing.CHUNK_BYTES)
    packed = [piece for piece in pieces if len(piece.parts) > 1]
    size = buffer_bytes(packed) if packed else 1
    # At least two: a piece may arrive while the one before is sent on.
    in_memory = max(
        MESSAGES_IN_BUFFERS, MESSAGES_IN_BUFFERS * coalescing.CHUNK_BYTES // size
    )
    num_buffers = min(len(packed), in_memory)
    buffers = [memory.empty(num_buffers * size, torch.uint8, d) for d in devices]
    # By number of the sender and of its buffer: when it was last read.
    read: dict[tuple[int, int], torch.Event | None] = {}
    # The pieces in buffers, by number of the buffer.
    arrived: list[Piece[_Key]] = []
    with Lanes(devices, transfers, phase) as lanes:
        for piece in pieces:
            parts = piece.of(flat[0])
            is_packed = len(parts) > 1
            turn = len(arrived)
            source = parts[0]
            if is_packed:
                lanes.use_departing(devices[0])
                source = piece.in_buffer(buffers[0][turn * size :])
                piece.pack(parts, source)
                arrived.append(piece)
            for sender, receiver in pairwise(range(len(devices))):
                if is_packed:
                    target = piece.in_buffer(buffers[receiver][turn * size :])
                    event = read.get((receiver, turn))
                    lanes.receive_after(event, devices[receiver])
                else:
                    (target,) = piece.of(flat[receiver])
                lanes.send(source, devices[sender], target, devices[receiver])
                if is_packed:
                    read[sender, turn] = lanes.sent(devices[sender])
                lanes.send_arrived(devices[receiver])
                source = target
            is_last = piece is pieces[-1]
            if arrived and (len(arrived) == num_buffers or is_last):
                for receiver in range(1, len(devices)):
                    lanes.use_arriving(devices[receiver])
                    _unpack(arrived, buffers[receiver], size, flat[receiver])
                arrived = []


def _unpack(
    pieces: Sequence[Piece[_Key]],
    buffer: Tensor,
    size: int,
    flat: Mapping[_Key, Tensor],
) -> None:
    """Copy pieces out of the buffers of a device, with few launches."""
    by_dtype: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]]
    by_dtype = defaultdict(lambda: ([], []))
    for number, piece in enumerate(pieces):
        targets, sources = by_dtype[piece.dtype]
        targets += piece.of(flat)
        packed = piece.in_buffer(buffer[number * size :])
        sources += packed.split(piece.sizes)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
