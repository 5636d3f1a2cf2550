"""Tensors travel in chunks: small ones together, large ones in pieces.

So what lies between two memories is a chunk, however large the model is. A message is of one dtype
and holds elements in the order of memory: both ends see them as 1-D and contiguous, whatever the
strides of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from scatterpar.devices.flat import by_dtype
from scatterpar.devices.ledger import Ledger

__all__ = [
    "CHUNK_BYTES",
    "Piece",
    "bring",
    "in_chunks",
    "in_memory_order",
    "messages",
    "packed",
    "rounds",
]

CHUNK_BYTES = 2**26

_Key = TypeVar("_Key")


class Piece(NamedTuple, Generic[_Key]):
    """Elements ``start`` to ``stop`` of one tensor, in the order of memory."""

    key: _Key
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements these are."""
        return self.stop - self.start


def messages(sizes: Iterable[tuple[_Key, int]], most: int) -> Iterator[list[Piece[_Key]]]:
    """What travels together: consecutive tensors of at most so many elements in all.

    How a tensor is cut depends on its own size alone.

    >>> [[tuple(piece) for piece in message] for message in messages({"a": 2, "b": 7}.items(), 4)]
    [[('a', 0, 2)], [('b', 0, 4)], [('b', 4, 7)]]
    """
    message: list[Piece[_Key]] = []
    room = most
    for key, size in sizes:
        for start in range(0, size, most):
            piece = Piece(key, start, min(size, start + most))
            if message and piece.size > room:
                yield message
                message, room = [], most
            message.append(piece)
            room -= piece.size
    if message:
        yield message


def in_chunks(tensors: Mapping[_Key, Tensor]) -> Iterator[list[Piece[_Key]]]:
    """1-D tensors as messages of one dtype each, in which no more than a chunk travels."""
    for dtype, keys in by_dtype(tensors.items()).items():
        sizes = ((key, tensors[key].numel()) for key in keys)
        yield from messages(sizes, CHUNK_BYTES // dtype.itemsize)


def packed(tensors: Mapping[_Key, Tensor]) -> Iterator[tuple[list[Piece[_Key]], Tensor]]:
    """1-D tensors as messages: one, or a piece of one, as it is; several as a copy.

    There is room for one message at a time: be done with it before asking for the next.
    """
    for message in in_chunks(tensors):
        parts = [tensors[key][start:stop] for key, start, stop in message]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        del parts
        yield message, flat
        del flat


def bring(
    tensors: Mapping[_Key, Tensor], device: torch.device, ledger: Ledger, phase: str
) -> Iterator[list[tuple[Piece[_Key], Tensor]]]:
    """1-D tensors in the memory of ``device``, message by message: pieces, and what they hold.

    There is room for one message at a time, as in ``packed``.
    """
    for message, flat in packed(tensors):
        arrived = ledger.copy(flat, device, phase)
        del flat
        pieces = list(zip(message, arrived.split([p.size for p in message]), strict=True))
        del arrived
        yield pieces
        del pieces


def in_memory_order(tensor: Tensor) -> Tensor | None:
    """The elements of a dense tensor in the order of memory: a 1-D view.

    ``None`` where there is none: for gaps, overlaps, and conjugates that are not resolved.
    """
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.is_contiguous() and not _is_dense(tensor):
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs (near, far) of a tree over ``count`` devices: the far one's sum joins the near one's.

    Backwards, each round sends from those that have something to as many that have not.

    >>> rounds(5)
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]
    """
    found = []
    step = 1
    while step < count:
        found.append([(i, i + step) for i in range(0, count - step, 2 * step)])
        step *= 2
    return found
