"""Copy tensors in chunks: small ones together, large ones alone, the largest in pieces.

So only a chunk is in flight between two memories, however large the model is. A message has one
dtype and holds elements in the order of memory: on both sides it is 1-D and contiguous, whatever
the strides of the tensors.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from scatterpar.devices import runtime
from scatterpar.devices.transfers import Transfers, write

CHUNK_BYTES = 2**26

ALONE_BYTES = 2**22  # from this size on, a separate message is cheaper than packing the tensor

_ALIGNMENT = 64  # bytes, as torch aligns allocations
_Key = TypeVar("_Key")
Pairs = tuple[list[Tensor], list[Tensor]]


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor with this ``key``, in the order of memory."""

    key: int
    start: int
    stop: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a 1-D tensor."""
        return tensor if self.is_whole else tensor[self.start : self.stop]


class Message(NamedTuple):
    """Pieces that are copied together, with the number of elements of each."""

    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]

    def of(self, tensors: Mapping[int, Tensor] | Sequence[Tensor]) -> list[Tensor]:
        """The pieces, as views of these 1-D tensors."""
        return [piece.of(tensors[piece.key]) for piece in self.pieces]


@functools.lru_cache(maxsize=256)  # the same in every step and for every pair of devices
def messages(
    sizes: tuple[tuple[int, int], ...], max_size: int, alone: int = sys.maxsize
) -> tuple[Message, ...]:
    """Group consecutive tensors into messages of at most so many elements.

    How a tensor is cut depends on its size only. Tensors of ``alone`` elements or more come
    before the others, each in messages of its own.

    >>> [message.sizes for message in messages(((0, 2), (1, 7)), 4)]
    [(2,), (4,), (3,)]
    >>> [message.sizes for message in messages(((0, 2), (1, 7), (2, 1)), 9, alone=5)]
    [(7,), (2, 1)]
    """
    groups: list[list[Piece]] = []
    room = 0
    for key, size in sorted(sizes, key=lambda pair: pair[1] < alone):
        for start in range(0, size, max_size):
            stop = min(size, start + max_size)
            if stop - start > room:
                groups.append([])
                room = max_size
            groups[-1].append(Piece(key, start, stop, stop - start == size))
            room = 0 if size >= alone else room - (stop - start)
    return tuple(Message(tuple(group), tuple(p.stop - p.start for p in group)) for group in groups)


def iter_messages(tensors: Mapping[int, Tensor]) -> Iterator[tuple[Message, Tensor]]:
    """Yield 1-D tensors as messages of one dtype: a single piece as a view, several as a copy.

    Only one message has memory at a time: drop it before you request the next.
    """
    for dtype, keys in by_dtype(tensors.items()).items():
        sizes = tuple([(key, tensors[key].numel()) for key in keys])
        max_size, alone = CHUNK_BYTES // dtype.itemsize, ALONE_BYTES // dtype.itemsize
        for message in messages(sizes, max_size, alone):
            parts = message.of(tensors)
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            del parts
            yield message, flat
            del flat


def iter_received(
    tensors: Mapping[int, Tensor], device: torch.device, transfers: Transfers, phase: str
) -> Iterator[tuple[Message, tuple[Tensor, ...]]]:
    """Yield messages, as ``iter_messages``, and their pieces in the memory of ``device``."""
    for message, flat in iter_messages(tensors):
        arrived = transfers.copy(flat, device, phase)
        del flat
        parts = arrived.split(message.sizes)
        del arrived
        yield message, parts
        del parts


def copy_coalesced(
    tensors: Mapping[int, Tensor], device: torch.device, transfers: Transfers, phase: str
) -> dict[int, Tensor]:
    """Copies of ``tensors`` in the memory of ``device``, dense ones in few messages."""
    copies: dict[int, Tensor] = {}
    flats: dict[int, Tensor] = {}
    for i, tensor in tensors.items():
        flat = flat_view(tensor)
        if flat is None:
            copies[i] = transfers.copy(tensor, device, phase)
        else:
            flats[i] = flat
            memory = runtime.empty(flat.numel(), flat.dtype, device)
            copies[i] = memory.as_strided(tensor.shape, tensor.stride())
    destinations = {i: copies[i].as_strided((flat.numel(),), (1,)) for i, flat in flats.items()}
    for message, parts in iter_received(flats, device, transfers, phase):
        torch._foreach_copy_(message.of(destinations), parts)
        del parts
    return copies


def flat_view(tensor: Tensor) -> Tensor | None:
    """A 1-D view of a dense tensor's elements in the order of memory, or the tensor itself.

    ``None`` if there is none: for gaps, overlaps, and lazy conjugates.
    """
    if not has_flat_view(tensor):
        return None
    return tensor if tensor.stride() == (1,) else tensor.as_strided((tensor.numel(),), (1,))


def has_flat_view(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory, each with a separate place."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.is_contiguous()  # true for a tensor without elements
            expected *= size
    return True


def has_places(tensor: Tensor) -> bool:
    """Whether each element of a dense tensor has a separate place in memory: it is not expanded."""
    strides = tensor.stride()
    return 0 not in strides or all(
        stride or size < 2 for size, stride in zip(tensor.shape, strides, strict=True)
    )


def tree_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs (target, source) of a tree, in rounds. The pairs of one round are independent.

    The sum of gradients uses them over replicas: the source is added to the target. ``Broadcast``
    uses them over devices, in reverse: the target sends to the source.

    >>> tree_rounds(5)
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]
    """
    tree = []
    step = 1
    while step < count:
        tree.append([(i, i + step) for i in range(0, count - step, 2 * step)])
        step *= 2
    return tree


def by_dtype(tensors: Iterable[tuple[_Key, Tensor]]) -> dict[torch.dtype, list[_Key]]:
    """The keys of the tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[_Key]] = defaultdict(list)
    for key, tensor in tensors:
        groups[tensor.dtype].append(key)
    return groups


def empty_like_on(
    tensors: Sequence[Tensor], device: torch.device, together: Callable[[Tensor], bool]
) -> list[Tensor]:
    """Uninitialised tensors on ``device``, like ``tensors`` but without gaps.

    Each starts at an allocation boundary, because the order of a kernel's sum may depend on the
    alignment. Tensors of one storage stay in one storage if ``together`` is true for them: a write
    to ``table`` shows in ``table[0]``, and cuDNN accepts the weights of a recurrent layer.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        groups[tensor.untyped_storage().data_ptr() if together(tensor) else -1 - i].append(i)
    allocated = {}
    for group in groups.values():
        if len(group) == 1:
            tensor = tensors[group[0]]
            strides = torch.empty_like(tensor, device="meta").stride()
            memory = runtime.empty(tensor.numel(), tensor.dtype, device)
            allocated[group[0]] = memory.as_strided(tensor.shape, strides)
            continue
        spans = {i: _span(tensors[i]) for i in group}
        first = min(start for start, _ in spans.values()) // _ALIGNMENT * _ALIGNMENT
        size = max(stop for _, stop in spans.values()) - first
        storage = runtime.empty(size, torch.uint8, device).untyped_storage()
        for i, (start, _) in spans.items():
            like, offset = tensors[i], (start - first) // tensors[i].element_size()
            view = runtime.empty(0, like.dtype, device)
            view.set_(storage, offset, like.shape, like.stride())
            allocated[i] = view.conj() if like.is_conj() else view
    return [allocated[i] for i in range(len(tensors))]


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses where the tensor's memory begins and ends."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source to its target, in the same memory."""
    copy_lists(grouped(targets, sources))


def copy_lists(lists: Sequence[Pairs]) -> None:
    """Copy the sources to their targets in the same memory, in lists as ``grouped`` makes them."""
    for targets, sources in lists:
        if _is_conj_or_neg(targets[0]):  # torch's operator for lists refuses these
            for target, source in zip(targets, sources, strict=True):
                write(target, source)
        else:
            torch._foreach_copy_(targets, sources)


def plus(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two tensors. torch supports dense + sparse, but not sparse + dense."""
    return one + other if one.layout == torch.strided else other + one


def grouped(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Pairs]:
    """Lists of pairs that agree in both dtypes, and in whether both tensors have equal strides.

    torch's operators on lists then need few kernels per list. One pair of another dtype, such as a
    batch normalisation's integer, makes torch launch one kernel per tensor.
    """
    groups: dict[Any, Pairs] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        equal = target.stride() == source.stride() and target.shape == source.shape
        group = groups[target.dtype, source.dtype, equal, _is_conj_or_neg(target)]
        group[0].append(target)
        group[1].append(source)
    return list(groups.values())


def _is_conj_or_neg(tensor: Tensor) -> bool:
    """Whether its memory holds the conjugates, or the negatives, of its elements."""
    return tensor.is_conj() or tensor.is_neg()
