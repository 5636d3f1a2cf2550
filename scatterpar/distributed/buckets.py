"""The data that ranks exchange: gradients to be added, and other tensors side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.transfers import as_bytes, to_device, to_numbers, write
from scatterpar.replicas.buffers import BufferValue
from scatterpar.replicas.replicas import Statistics, sum_dtype
from scatterpar.step.reduce import Gradient

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SUMMED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)  # dtypes that collectives can add; other buffers are sent as bytes

# A part of a flat tensor: dtype, shape, the index that this rank writes (``...`` for all of it, or
# its row), and the value. ``None`` leaves zeros.
_Piece = tuple[torch.dtype, torch.Size, Any, Tensor | None]


class Buckets:
    """The part of this rank in the step's all-reduce: ``flats`` has one 1-D tensor per dtype.

    They contain the gradients, zero if this rank has none; one flag per gradient, which says
    whether this rank has one; buffers, from rank 0 only; and, in one row per rank, the statistics
    that are pooled. They are allocated before any exchange, so that an allocation fails while the
    other ranks can still be informed.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        buffers: Sequence[BufferValue],
        statistics: Statistics | None,
        rank: int,
        size: int,
        *,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self._leaves, self._statistics = [leaf for leaf, _ in gradients], statistics
        self._first = [(at, name, v.detach()) for at, name, v in buffers if v is not None]
        self._gone = [buffer for buffer in buffers if buffer[2] is None]
        self._rows = statistics.to_pool() if statistics else []
        pieces: list[_Piece] = [
            (sum_dtype(t, accumulate_dtype), t.shape, ..., g) for t, g in gradients
        ]
        if gradients:
            has_gradient = torch.tensor([gradient is not None for _, gradient in gradients])
            pieces.append((pieces[0][0], has_gradient.shape, ..., has_gradient))
        for value in (_summable(value) for *_, value in self._first):
            pieces.append((value.dtype, value.shape, ..., None if rank else value))
        for value in map(_summable, self._rows):
            pieces.append((value.dtype, torch.Size([size, *value.shape]), rank, value))
        tensors = (*self._leaves, *(value for *_, value in self._first), *self._rows)
        names = [(name, value is None) for _, name, value in buffers]
        self.kind = str([names, *(piece[:2] for piece in pieces)])
        self.flats: list[Tensor] = []
        self._views = [torch.empty(0)] * len(pieces)
        for dtype in dict.fromkeys(dtype for dtype, *_ in pieces):
            indices = [i for i, piece in enumerate(pieces) if piece[0] == dtype]
            sizes = [pieces[i][1].numel() for i in indices]
            self.flats.append(torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device))
            for i, part in zip(indices, self.flats[-1].split(sizes), strict=True):
                _, shape, at, mine = pieces[i]
                self._views[i] = part.view(shape)
                if mine is not None:
                    write(self._views[i][at], mine.detach())

    def weigh(self, factor: float) -> None:
        """Scale this rank's gradients; called when the counts of the other ranks are known."""
        if self._leaves and factor != 1:
            torch._foreach_mul_(self._views[: len(self._leaves)], factor)

    def of_all(self) -> tuple[list[Gradient], list[BufferValue], Statistics | None]:
        """The results of all ranks, after the all-reduce."""
        views = iter(self._views)
        totals = [next(views) for _ in self._leaves]
        has_gradient = to_numbers(next(views)) if totals else []
        gradients = [
            total if flag else None for total, flag in zip(totals, has_gradient, strict=True)
        ]
        buffers = [(at, name, _like(next(views), value)) for at, name, value in self._first]
        rows = [[_like(row, value) for row in next(views)] for value in self._rows]
        statistics = self._statistics.pooled(rows) if self._statistics else None
        return list(zip(self._leaves, gradients, strict=True)), [*buffers, *self._gone], statistics


def pack(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """A 1-D byte tensor on the first tensor's device: bytes of the tensors, then of the numbers."""
    flat = [*map(as_bytes, tensors), as_bytes(torch.tensor(numbers))]
    return torch.cat([to_device(each, flat[0].device) for each in flat])


def unpack(payload: Tensor, like: Any, numbers: int) -> tuple[Any, list[int]]:
    """The tensors that a rank packed, in the structure of ``like``, and its first numbers.

    It packed ``numbers`` numbers. The last are the tensors' sizes, which are not returned.
    """
    sizes = to_numbers(payload[-8 * numbers :].clone().view(torch.int64))
    num_sizes = sum(leaf.ndim for leaf in nested.tensors(like))
    others, remaining = sizes[: numbers - num_sizes], iter(sizes[numbers - num_sizes :])
    end = 0

    def read(leaf: Tensor) -> Tensor:
        nonlocal end
        shape = [next(remaining) for _ in leaf.shape]
        start, end = end, end + math.prod(shape) * leaf.itemsize
        return to_device(payload[start:end].clone().view(leaf.dtype).view(shape), leaf.device)

    return nested.map_tensors(read, like), others


def kind_of(value: Any, dim: int) -> str:
    """A description of a nested value without the number of rows; must be equal on all ranks."""
    return ";".join([_kind(leaf, dim) for leaf in nested.leaves(value)])


def _kind(leaf: Any, dim: int) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
    others = list(leaf.shape)
    if -len(others) <= dim < len(others):
        others[dim] = -1
    return f"{leaf.dtype}{others}"


def _summable(value: Tensor) -> Tensor:
    """``value``, or its bytes if collectives cannot add its dtype."""
    return value if value.dtype in _SUMMED else as_bytes(value)


def _like(total: Tensor, value: Tensor) -> Tensor:
    """``total`` with the dtype and shape that ``value`` had before ``_summable``."""
    if total.dtype == value.dtype:
        return total
    return total.clone().view(value.dtype).view(value.shape)  # a copy is aligned for any dtype
