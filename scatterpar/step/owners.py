"""Add large gradients on all devices at once, in the order of the tree.

The gradients are cut into pieces. Every device except the master owns some of them: it
gets these pieces of all gradients, adds them, and sends the sums to the master::

    turn    device 1 gets    device 2 gets    device 3 gets    the master gets
    1       0's piece 0      3's piece 1      2's piece 2
    2       3's piece 0      0's piece 1      1's piece 2
    3       2's piece 0      1's piece 1      0's piece 2
    1       0's piece 3      3's piece 4      2's piece 5      the sum of piece 0
    2       3's piece 3      0's piece 4      1's piece 5      the sum of piece 1

In each turn a device sends one piece and gets one, from the device whose number differs
from its own in the bits of the turn. So no link carries the gradients more than once in
a direction, where the tree brings them to the master log2(devices) times. In exchange
the master's gradients are copied to the owners.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from scatterpar.devices import coalescing, memory
from scatterpar.devices.lanes import Lanes
from scatterpar.devices.pieces import (
    MESSAGES_IN_BUFFERS,
    Piece,
    buffer_bytes,
    cut_into_pieces,
    flat_view,
    needs_pieces,
)
from scatterpar.devices.transfers import Transfers

_DTYPE_OF_GRADIENT = operator.attrgetter("dtype")
_STRIDE_OF_GRADIENT = Tensor.stride


def add_by_owners(
    gradients: Sequence[dict[int, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
) -> dict[int, Tensor]:
    """Take gradients that all devices have out of ``gradients``, if they are large.

    Returns their sums, which overwrite the gradients of the first device. ``devices``
    differ, one for each entry of ``gradients``.
    """
    # Sparse tensors have no ``nbytes``.
    size = sum(
        gradient.nbytes
        for gradient in gradients[0].values()
        if gradient.layout == torch.strided
    )
    if not needs_pieces(size, len(devices)):
        return {}
    flat = _flat_of_all(gradients)
    if not needs_pieces(
        sum(tensor.nbytes for tensor in flat[0].values()), len(devices)
    ):
        return {}
    _add_pieces(flat, devices, transfers)
    sums = {index: gradients[0][index] for index in flat[0]}
    for of_device in gradients:
        for index in sums:
            del of_device[index]
    return sums


def _flat_of_all(gradients: Sequence[Mapping[int, Tensor]]) -> list[dict[int, Tensor]]:
    """Flat views of the gradients that are alike on all devices."""
    first, *others = gradients
    of_first = _flat_of(first)
    alike: Sequence[int] = list(of_first)
    for of_device in others:
        alike = _indices_alike(alike, first, of_device)
    flat = [{index: of_first[index] for index in alike}]
    sizes = [(view.numel(),) for view in flat[0].values()]
    for of_device in others:
        found = map(of_device.__getitem__, alike)
        views = map(Tensor.as_strided, found, sizes, repeat((1,)))
        flat.append(dict(zip(alike, views, strict=True)))
    return flat


def _flat_of(gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Flat views of those of these gradients that have one."""
    # Few Python calls, because a model has hundreds of gradients on each device.
    tensors = gradients.values()
    with contextlib.suppress(RuntimeError):  # one is sparse
        if (
            {Tensor}.issuperset(map(type, tensors))
            and all(map(Tensor.is_contiguous, tensors))
            and all(map(Tensor.numel, tensors))
            and not any(map(Tensor.is_conj, tensors))
            and not any(map(Tensor.is_neg, tensors))
        ):
            views = map(Tensor.view, tensors, repeat(-1))
            return dict(zip(gradients, views, strict=True))
    flat: dict[int, Tensor] = {}
    for index, gradient in gradients.items():
        view = flat_view(gradient)
        if view is not None:
            flat[index] = view
    return flat


def _indices_alike(
    indices: Sequence[int], first: Mapping[int, Tensor], other: Mapping[int, Tensor]
) -> Sequence[int]:
    """Those of these gradients that have a flat view like that of the first device."""
    with contextlib.suppress(KeyError, RuntimeError):  # one is missing; one is sparse
        tensors = list(map(other.__getitem__, indices))
        of_first = list(map(first.__getitem__, indices))
        if (
            {Tensor}.issuperset(map(type, tensors))
            and all(
                map(
                    operator.eq,
                    map(_DTYPE_OF_GRADIENT, tensors),
                    map(_DTYPE_OF_GRADIENT, of_first),
                )
            )
            and all(
                map(
                    operator.eq,
                    map(_STRIDE_OF_GRADIENT, tensors),
                    map(_STRIDE_OF_GRADIENT, of_first),
                )
            )
            and not any(map(Tensor.is_conj, tensors))
            and not any(map(Tensor.is_neg, tensors))
        ):
            return indices
    return [index for index in indices if _is_alike(other.get(index), first[index])]


def _is_alike(gradient: Tensor | None, first: Tensor) -> bool:
    """Whether a gradient has a flat view like that of another replica's."""
    return (
        type(gradient) is Tensor
        and gradient.layout == torch.strided
        and gradient.dtype == first.dtype
        and gradient.stride() == first.stride()
        and not gradient.is_conj()
        and not gradient.is_neg()
    )


def _add_pieces(
    flat: Sequence[Mapping[int, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
) -> None:
    """Add all pieces, a group with one piece per owner at a time."""
    count = len(devices)
    max_bytes = MESSAGES_IN_BUFFERS * coalescing.CHUNK_BYTES
    # The levels of the tree, and a piece that arrives.
    slots = (count - 1).bit_length() + 1
    pieces = cut_into_pieces(flat[0], count, max_bytes // (slots + 1))
    if len(pieces) >= count:  # the sums of a group are sent beside the next one
        slots += 1
        pieces = cut_into_pieces(flat[0], count, max_bytes // (slots + 1))
    lanes = Lanes(devices, transfers, "reduce")
    size = buffer_bytes(pieces)
    members: list[_Device] = []
    for number, device in enumerate(devices):
        # The master adds nothing: sums that arrive need one buffer.
        num_buffers = slots if number else 1
        members.append(_Device(flat[number], device, lanes, size, num_buffers))
    master, *owners = members
    groups: list[Sequence[Piece[int]]] = []
    for start in range(0, len(pieces), len(owners)):
        groups.append(pieces[start : start + len(owners)])
    earlier: Sequence[Piece[int]] = ()
    with lanes:
        # The sums of the last group arrive beside no other group.
        for group in [*groups, ()]:
            for turn in range(1, 1 << (count - 1).bit_length()):
                for number, piece in enumerate(group, 1):
                    sender = number ^ turn
                    arriving = members[sender] if sender < count else None
                    members[number].add(piece, turn, arriving)
                # In this turn its owner sends no gradients, and the master gets none.
                if turn <= len(earlier):
                    members[turn].send_sum(earlier[turn - 1], master)
            for owner in owners[: len(group)]:
                owner.end()
            earlier = group


class _Device:
    """One device: its gradients, and the buffers in which it adds those of all.

    Gradients arrive in the order of the tree around the owner: its neighbour, the two
    of the next pair, the four after them. Each partial sum has a buffer::

        turn    partial sums of device 2, of 8
        0       own
        1       2+3
        2       2+3        0
        3       2+3+0+1                             after 0+1
        4       2+3+0+1    6
        5       2+3+0+1    6+7
        6       2+3+0+1    6+7    4
        7       all                                 after 4+5, and 6+7+4+5
    """

    def __init__(
        self,
        flat: Mapping[int, Tensor],
        device: torch.device,
        lanes: Lanes,
        size: int,
        num_buffers: int,
    ) -> None:
        self._flat = flat
        self._device = device
        self._lanes = lanes
        in_all = memory.empty((num_buffers + 1) * size, torch.uint8, device)
        # One for packing.
        self._packed, *self._buffers = in_all.split(size)
        # The free buffers. One whose sum was sent is written after an event.
        self._free: deque[tuple[Tensor, torch.Event | None]] = deque()
        for buffer in self._buffers:
            self._free.append((buffer, None))
        # ``None`` in the first place: the gradients of this device, which have no
        # buffer. In others: no device is there.
        self._partial_sums: list[Tensor | None] = [None]
        self._sum: Tensor | None = None

    def add(self, piece: Piece[int], turn: int, sender: _Device | None) -> None:
        """Get the piece of a device, if there is one, and add what is complete."""
        arrived = None if sender is None else self._receive(piece, sender)
        self._partial_sums.append(arrived)
        while turn & 1:  # as a binary counter carries
            second = self._partial_sums.pop()
            first = self._partial_sums.pop()
            self._partial_sums.append(self._plus(piece, first, second))
            turn >>= 1

    def _receive(self, piece: Piece[int], sender: _Device) -> Tensor:
        """Copy the piece of another device into a free buffer, which is returned."""
        parts = piece.of(sender._flat)
        source = parts[0]
        if len(parts) > 1:
            self._lanes.use_departing(sender._device)
            source = piece.in_buffer(sender._packed)
            piece.pack(parts, source)
        buffer, event = self._free.popleft()
        self._lanes.receive_after(event, self._device)
        target = piece.in_buffer(buffer)
        self._lanes.send(source, sender._device, target, self._device)
        return buffer

    def _plus(
        self, piece: Piece[int], first: Tensor | None, second: Tensor | None
    ) -> Tensor | None:
        """The sum of two partial sums, in the buffer of one."""
        if second is None:
            return first
        self._lanes.use_arriving(self._device)
        total = piece.in_buffer(second)
        if first is not None:
            total.add_(piece.in_buffer(first))
            self._free.appendleft((first, None))
        elif not self._partial_sums:
            piece.add(piece.of(self._flat), total)
        return second

    def end(self) -> None:
        """Note that all pieces have arrived: the sum may be sent."""
        (self._sum,) = self._partial_sums
        self._partial_sums = [None]
        self._lanes.send_arrived(self._device)

    def send_sum(self, piece: Piece[int], master: _Device) -> None:
        """Copy the sum of a piece to the master's gradients."""
        assert self._sum is not None
        total = piece.in_buffer(self._sum)
        parts = piece.of(master._flat)
        if len(parts) == 1:
            self._lanes.send(total, self._device, parts[0], master._device)
        else:
            arrived = piece.in_buffer(master._buffers[0])
            self._lanes.send(total, self._device, arrived, master._device)
            self._lanes.use_arriving(master._device)
            piece.unpack(arrived, parts)
        self._free.append((self._sum, self._lanes.sent(self._device)))
