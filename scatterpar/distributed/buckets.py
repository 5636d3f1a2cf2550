"""The data that ranks exchange: gradients to be added, and other tensors side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.transfers import as_bytes, to_device, to_numbers, write
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step.reduce import Outcome

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

# A part of a flat tensor: dtype, shape, the index that this rank writes (``...`` for all of it, or
# its row), and the value. ``None`` leaves zeros.
_Piece = tuple[torch.dtype, torch.Size, Any, Tensor | None]


class Buckets:
    """The part of this rank in the step's all-reduce: ``flats`` has one 1-D tensor per dtype.

    They contain the gradients, zero if this rank has none; a flag per gradient, whether this rank
    has one; buffers, from rank 0 only; and, in one row per rank, the statistics that are pooled.
    What has no gradient's dtype is sent as bytes. An allocation fails here, while the other ranks
    can still be informed. ``kind`` must be equal on all ranks.
    """

    def __init__(
        self, outcome: Outcome, rank: int, size: int, accumulate_dtype: torch.dtype | None
    ) -> None:
        self._outcome = outcome
        gradients, statistics = outcome.gradients, outcome.statistics
        buffers = [value.detach() for *_, value in outcome.buffers if value is not None]
        self._rows = statistics.to_pool() if statistics else []
        pieces: list[_Piece] = []
        for leaf, gradient in gradients:
            dense = None if gradient is None else gradient.to_dense()
            pieces.append((sum_dtype(leaf, accumulate_dtype), leaf.shape, ..., dense))
        if pieces:
            flags = torch.tensor([gradient is not None for _, gradient in gradients])
            pieces.append((pieces[0][0], flags.shape, ..., flags))
        dtypes = {piece[0] for piece in pieces}
        for value in buffers:
            value = value if value.dtype in dtypes else as_bytes(value)
            pieces.append((value.dtype, value.shape, ..., None if rank else value))
        for value in self._rows:
            value = value if value.dtype in dtypes else as_bytes(value)
            pieces.append((value.dtype, torch.Size([size, *value.shape]), rank, value))
        names = [(name, value is None or value.dtype) for _, name, value in outcome.buffers]
        self.kind = str([names, *(piece[:2] for piece in pieces)])
        sizes = Counter[torch.dtype]()
        for dtype, shape, *_ in pieces:
            sizes[dtype] += shape.numel()
        tensors = *(leaf for leaf, _ in gradients), *buffers, *self._rows
        free = {d: torch.zeros(n, dtype=d, device=tensors[0].device) for d, n in sizes.items()}
        self.flats, self._views = [*free.values()], list[Tensor]()
        for dtype, shape, at, own in pieces:
            part, free[dtype] = free[dtype].tensor_split([shape.numel()])
            self._views.append(part.view(shape))
            if own is not None:
                write(self._views[-1][at], own.detach())

    def weigh(self, factor: float) -> None:
        """Scale this rank's gradients; called when the counts of the other ranks are known."""
        if self._outcome.gradients and factor != 1:
            torch._foreach_mul_(self._views[: len(self._outcome.gradients)], factor)

    def of_all(self) -> Outcome:
        """The outcome with the gradients, buffers and statistics of all ranks' all-reduce."""
        outcome, views = self._outcome, iter(self._views)
        totals = [(leaf, next(views)) for leaf, _ in outcome.gradients]
        flags = to_numbers(next(views)) if totals else []
        found = zip(totals, flags, strict=True)
        gradients = [(leaf, total if flag else None) for (leaf, total), flag in found]
        buffers = [
            (at, name, None if value is None else _like(next(views), value))
            for at, name, value in outcome.buffers
        ]
        rows = [[_like(row, value) for row in next(views)] for value in self._rows]
        statistics = outcome.statistics.pooled(rows) if outcome.statistics else None
        return replace(outcome, gradients=gradients, buffers=buffers, statistics=statistics)


def pack(tensors: Sequence[Tensor], *numbers: int) -> Tensor:
    """A 1-D byte tensor: the bytes of the tensors, then of the numbers and the tensors' sizes."""
    header = torch.tensor([*numbers, *(size for tensor in tensors for size in tensor.shape)])
    flat = list(map(as_bytes, (*tensors, header)))
    return torch.cat([to_device(each, flat[0].device) for each in flat])


def unpack(payload: Tensor, like: Any) -> tuple[Any, int, int]:
    """The tensors that a rank packed, in the structure of ``like``, and its two numbers."""
    num_sizes = sum(leaf.ndim for leaf in nested.tensors(like))
    header = payload[-8 * (2 + num_sizes) :].clone().view(torch.int64)
    first, second, *sizes = to_numbers(header)
    remaining, end = iter(sizes), 0

    def read(leaf: Tensor) -> Tensor:
        nonlocal end
        shape = [next(remaining) for _ in leaf.shape]
        start, end = end, end + math.prod(shape) * leaf.itemsize
        return to_device(payload[start:end].clone().view(leaf.dtype).view(shape), leaf.device)

    return nested.map_tensors(read, like), first, second


def kind_of(value: Any, dim: int) -> str:
    """A description of a nested value without the number of rows; must be equal on all ranks."""

    def kind(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
        others = list(leaf.shape)
        if -len(others) <= dim < len(others):
            others[dim] = -1
        return f"{leaf.dtype}{others}"

    return ";".join(map(kind, nested.leaves(value)))


def _like(total: Tensor, value: Tensor) -> Tensor:
    """``total`` in the dtype and shape of ``value``, which may have been sent as bytes."""
    if total.dtype != value.dtype:
        total = total.clone().view(value.dtype)  # a copy is aligned for any dtype
    return total.view(value.shape)
