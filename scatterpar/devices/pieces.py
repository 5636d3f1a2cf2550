"""Large lists of tensors, cut into pieces of equal size for several devices.

::

    tensors    weight of 20 elements         biases of 3, 4 and 3
    pieces     weight[0:10] weight[10:20]    bias[0:3] bias[0:4] bias[0:3]

A piece of several parts is packed into one buffer before it is copied.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from scatterpar.devices.coalescing import has_foreach

# For each device except the first. With fewer bytes, the launches for each piece cost
# the host more time than links save.
BYTES_PER_DEVICE = 2**23
# Messages whose memory the buffers of a device take together. The bound that the page
# on memory states.
MESSAGES_IN_BUFFERS = 2
# Elements of a piece are a multiple of this, unless it is a list's last one: it begins
# where kernels can read several elements at once.
_ELEMENTS = 16
# Bytes that kernels read at once. Not more: such pieces fill their buffers, so that
# several can be unpacked together.
_ALIGNMENT = 16
# A piece has at least this part of ``BYTES_PER_DEVICE``: 64 KiB, which take a link less
# time than the host takes to launch the copy.
_SMALLEST_PART = 128
_Key = TypeVar("_Key", bound=Hashable)
_DTYPE = attrgetter("dtype")


@dataclass(frozen=True)
class Piece(Generic[_Key]):
    """Consecutive elements of flat tensors of one dtype.

    Attributes:
        dtype: of the elements.
        parts: a tensor's key, and the numbers of its first element and of the one after
            the last.
        cut: the positions of the parts that are not whole tensors.
    """

    dtype: torch.dtype
    parts: Sequence[tuple[_Key, int, int]]
    cut: Sequence[int] = ()

    @cached_property
    def _keys(self) -> list[_Key]:
        return [key for key, _, _ in self.parts]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of each part."""
        return [stop - start for _, start, stop in self.parts]

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.sizes) * self.dtype.itemsize

    def of(self, flat: Mapping[_Key, Tensor]) -> list[Tensor]:
        """The parts of these tensors."""
        # Hundreds of parts, without a Python call for each.
        parts = list(map(flat.__getitem__, self._keys))
        for position in self.cut:
            _, start, stop = self.parts[position]
            parts[position] = parts[position][start:stop]
        return parts

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """The beginning of a buffer of bytes, as elements of the piece."""
        return buffer[: self.nbytes].view(self.dtype)

    def pack(self, parts: list[Tensor], packed: Tensor) -> None:
        """Copy the parts into one tensor of the same memory."""
        torch.cat(parts, out=packed)

    def add(self, parts: Sequence[Tensor], packed: Tensor) -> None:
        """Add the parts to what was packed, in the same memory."""
        torch._foreach_add_(list(packed.split(self.sizes)), list(parts))

    def unpack(self, packed: Tensor, parts: list[Tensor]) -> None:
        """Copy what was packed to the parts, in the same memory."""
        unpack(packed, self.sizes, parts)


def unpack(packed: Tensor, sizes: list[int], parts: list[Tensor]) -> None:
    """Copy consecutive elements to parts of these sizes, in the same memory."""
    # Not a view per part, which would take the host longer than the copy.
    torch.split_with_sizes_copy(packed, sizes, out=parts)
    increment_version(parts)  # which ``out=`` does not


def flat_view(tensor: Tensor) -> Tensor | None:
    """All elements of a tensor as a 1-D view, in the order of memory.

    ``None`` for a subclass, and if ``tensor`` is not dense, has gaps, or is empty.
    """
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return None
    # First: sparse tensors refuse the other questions.
    if not has_foreach(tensor) or not tensor.numel():
        return None
    is_flat = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return tensor.detach().as_strided((tensor.numel(),), (1,)) if is_flat else None


def in_words(flat: Tensor) -> Tensor:
    """A flat tensor as words of 32 bits, if each of its elements consists of some.

    So tensors of several dtypes are packed into one piece.
    """
    return flat.view(torch.int32) if flat.itemsize % 4 == 0 else flat


def needs_pieces(num_bytes: int, devices: int) -> bool:
    """Whether so many bytes are worth several copies at the same time.

    Not between two devices, which have one link.
    """
    return devices > 2 and num_bytes >= (devices - 1) * BYTES_PER_DEVICE


def cut_into_pieces(
    flat: Mapping[_Key, Tensor], devices: int, max_bytes: int
) -> Sequence[Piece[_Key]]:
    """Cut 1-D tensors into pieces of about ``max_bytes`` at most, the largest first.

    There are about as many as devices except the first, or more if they are large, or
    fewer if these would be tiny. More would be more launches, which cost more than
    links save. Large tensors are not packed: each is cut alone.
    """
    tensors = flat.values()
    sizes = tuple(
        zip(flat, map(_DTYPE, tensors), map(Tensor.numel, tensors), strict=True)
    )
    # Each step has the same ones. No tensor is kept alive.
    least = min(max_bytes, BYTES_PER_DEVICE // _SMALLEST_PART)
    pieces: Sequence[Piece[_Key]] = _cut(sizes, devices, least, max_bytes)
    return pieces


@functools.lru_cache(maxsize=64)
def _cut(
    sizes: Sequence[tuple[Any, torch.dtype, int]],
    devices: int,
    least_bytes: int,
    max_bytes: int,
) -> Sequence[Piece[Any]]:
    """Cut tensors of which key, dtype and number of elements are known."""
    by_dtype: defaultdict[torch.dtype, dict[Any, int]] = defaultdict(dict)
    for key, dtype, size in sizes:
        by_dtype[dtype][key] = size
    pieces: list[Piece[Any]] = []
    for dtype, of_dtype in by_dtype.items():
        most = max(_ELEMENTS, max_bytes // dtype.itemsize)
        wanted = -(-sum(of_dtype.values()) // (devices - 1))
        wanted = max(wanted, least_bytes // dtype.itemsize)
        elements = _ceil_to(_ELEMENTS, min(wanted, most))
        small: dict[Any, int] = {}
        for key, size in of_dtype.items():
            if 2 * size < elements:
                small[key] = size
                continue
            count = max(round(size / elements), -(-size // most))
            elements_of_part = _ceil_to(_ELEMENTS, -(-size // count))
            pieces += _in_pieces(dtype, {key: size}, elements_of_part)
        pieces += _in_pieces(dtype, small, elements)
    # Those that are copied at the same time take the same time.
    pieces.sort(key=lambda piece: piece.nbytes, reverse=True)
    return pieces


def _in_pieces(
    dtype: torch.dtype, sizes: Mapping[_Key, int], elements: int
) -> list[Piece[_Key]]:
    """Pieces of so many elements of these tensors, one after the other."""
    pieces: list[Piece[_Key]] = []
    for parts in _parts_of_pieces(sizes, elements):
        cut: list[int] = []
        for position, (key, start, stop) in enumerate(parts):
            if stop - start < sizes[key]:
                cut.append(position)
        pieces.append(Piece(dtype, parts, cut))
    return pieces


def _parts_of_pieces(
    sizes: Mapping[_Key, int], elements: int
) -> list[list[tuple[_Key, int, int]]]:
    """The parts of each piece of so many elements."""
    pieces: list[list[tuple[_Key, int, int]]] = []
    free = 0
    for key, size in sizes.items():
        start = 0
        while start < size:
            if not free:
                pieces.append([])
                free = elements
            stop = min(size, start + free)
            pieces[-1].append((key, start, stop))
            free -= stop - start
            start = stop
    return pieces


def buffer_bytes(pieces: Sequence[Piece[_Key]]) -> int:
    """The bytes of a buffer for any of the pieces, so that the next one is aligned."""
    largest = max(piece.nbytes for piece in pieces)
    return _ceil_to(_ALIGNMENT, largest)


def _ceil_to(multiple: int, number: int) -> int:
    return -(-number // multiple) * multiple
