"""What ranks send each other: gradients to be added up, all else as bytes, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.replicas.buffers import BufferValue, Layer, Moments, pooled
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step import nested
from scatterpar.step.nested import join_rows
from scatterpar.step.outcome import Gradient

__all__ = ["Parcels", "Shown"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SUMMED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)  # what collectives can add up; other buffers travel as bytes

_Piece = tuple[torch.dtype, torch.Size, Tensor | None]  # what this rank adds; nothing: zeros


class Parcels:
    """What this rank adds to the sums of all ranks, in ``flats``: one tensor a dtype.

    Gradients, whether this rank has one or not; a flag for each that says whether it was used;
    buffers, which are rank 0's alone; and in a row for each rank what is averaged (where ``mean``
    is asked for) or pooled. They are made before anything is exchanged, so that what can fail, such
    as an allocation, fails while the other ranks can still be told.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        buffers: Sequence[BufferValue],
        layers: Sequence[Layer],
        rank: int,
        size: int,
        *,
        mean: bool,
        wide: torch.dtype | None,
    ) -> None:
        self._leaves, self._layers = [leaf for leaf, _ in gradients], layers
        there = [(at, name, v.detach()) for at, name, v in buffers if v is not None]
        self._gone = [buffer for buffer in buffers if buffer[2] is None]
        self._averaged = [each for each in there if mean and _has_mean(each[2])]
        self._first = [each for each in there if not (mean and _has_mean(each[2]))]
        self._rows = [value for *_, value in self._averaged] + _moments(layers)
        pieces: list[_Piece] = [(sum_dtype(t, wide), t.shape, g) for t, g in gradients]
        if gradients:
            used = torch.tensor([gradient is not None for _, gradient in gradients])
            pieces.append((pieces[0][0], used.shape, used))
        for value in (_summable(value) for *_, value in self._first):
            pieces.append((value.dtype, value.shape, None if rank else value))
        for value in map(_summable, self._rows):
            table = value.new_zeros(size, *value.shape)
            table[rank] = value
            pieces.append((table.dtype, table.shape, table))
        tensors = (*self._leaves, *(value for *_, value in self._first), *self._rows)
        self.kind = str([piece[:2] for piece in pieces])
        self.flats: list[Tensor] = []
        self._views = [torch.empty(0)] * len(pieces)
        for dtype in dict.fromkeys(dtype for dtype, *_ in pieces):
            own = [i for i, piece in enumerate(pieces) if piece[0] == dtype]
            sizes = [pieces[i][1].numel() for i in own]
            self.flats.append(torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device))
            for i, part in zip(own, self.flats[-1].split(sizes), strict=True):
                _, shape, mine = pieces[i]
                self._views[i] = part.view(shape)
                if mine is not None:
                    self._views[i].copy_(mine.detach())

    def weigh(self, factor: float) -> None:
        """Scale this rank's gradients, now that the other ranks' counts are known."""
        if self._leaves and factor != 1:
            torch._foreach_mul_(self._views[: len(self._leaves)], factor)

    def of_all(
        self, weights: Sequence[float]
    ) -> tuple[list[Gradient], list[BufferValue], list[Layer]]:
        """What all ranks have together, once ``flats`` are the sums; means are by ``weights``."""
        views = iter(self._views)
        totals = [next(views) for _ in self._leaves]
        used = next(views).tolist() if totals else []
        given = [total if flag else None for total, flag in zip(totals, used, strict=True)]
        buffers = [(at, name, _like(next(views), value)) for at, name, value in self._first]
        rows = [[_like(row, value) for row in next(views)] for value in self._rows]
        for (at, name, _), values in zip(self._averaged, rows, strict=False):
            buffers.append((at, name, _mean(values, weights)))
        layers = _pooled(self._layers, rows[len(self._averaged) :])
        return list(zip(self._leaves, given, strict=True)), [*buffers, *self._gone], layers


class Shown:
    """One rank's outputs and targets, and how the other ranks' are read.

    A rank's bytes are a header of integers, which has the sizes of its tensors, and then those of
    the tensors. What the tensors are part of is the same on every rank.
    """

    def __init__(
        self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int, seed: int
    ) -> None:
        self._pieces, self._rows, self._dim = pieces, rows, dim
        detached = [nested.transform(_detached, piece) for piece in pieces]
        self._own = join_rows(detached, dim, rows, rows), targets
        self._tensors = [*nested.tensors(self._own)]
        self._header = [seed, sum(rows), *(n for tensor in self._tensors for n in tensor.shape)]
        self.kind = ";".join([_kind(leaf, dim) for leaf in nested.leaves(self._own)])

    def pack(self) -> Tensor:
        """A flat tensor of bytes, in the master's memory."""
        flat = [*map(_flat_bytes, self._tensors), _flat_bytes(torch.tensor(self._header))]
        return torch.cat([each.to(flat[0].device) for each in flat])

    def of_all(
        self, parcels: Sequence[Tensor], rank: int
    ) -> tuple[tuple[list[Any], list[int], Any], int]:
        """Pieces, rows and targets of the whole batch, and rank 0's seed, of what each packed."""
        pieces: list[Any] = []
        rows: list[int] = []
        targets: list[Any] = []
        seeds: list[int] = []
        for number, parcel in enumerate(parcels):
            header = parcel[-8 * len(self._header) :].clone().view(torch.int64).tolist()
            seeds.append(header.pop(0))
            count = header.pop(0)
            output, target = nested.transform(partial(_next_in, [parcel], header), self._own)
            pieces += self._pieces if number == rank else [output]
            rows += self._rows if number == rank else [count]
            targets.append(target)
        return (pieces, rows, nested.merge(self._join_targets, targets)), seeds[0]

    def _join_targets(self, leaves: list[Any]) -> Any:
        """Targets without rows are rank 0's."""
        has_rows = isinstance(leaves[0], Tensor) and leaves[0].ndim
        return torch.cat(leaves, self._dim) if has_rows else leaves[0]


def _next_in(remaining: list[Tensor], sizes: list[int], leaf: Any) -> Any:
    """The next tensor like ``leaf`` of the remaining bytes, of the next of these sizes."""
    if not isinstance(leaf, Tensor):
        return leaf
    shape = [sizes.pop(0) for _ in leaf.shape]
    count = math.prod(shape) * leaf.itemsize
    (own,), remaining[0] = [remaining[0][:count]], remaining[0][count:]
    return own.clone().view(leaf.dtype).view(shape).to(leaf.device)


def _kind(leaf: Any, dim: int) -> str:
    """What must be the same on all ranks."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
    others = list(leaf.shape)
    if others:
        others[dim] = -1
    return f"{leaf.dtype}{others}"


def _summable(value: Tensor) -> Tensor:
    """What collectives can add up: the bytes of a dtype that they cannot."""
    return value if value.dtype in _SUMMED else _flat_bytes(value)


def _like(total: Tensor, value: Tensor) -> Tensor:
    """``total`` as what ``value`` was made summable from."""
    if total.dtype == value.dtype:
        return total
    return total.clone().view(value.dtype).view(value.shape)  # a copy begins where any dtype may


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _has_mean(value: Tensor) -> bool:
    return value.dtype in _SUMMED and not value.is_complex()


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Exactly what all have where they have the same, infinities included."""
    first, mean = values[0], values[0].clone()
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean += torch.where(value == first, 0, value - first) * weight
    return mean


def _moments(layers: Sequence[Layer]) -> list[Tensor]:
    """Of each layer how many values it has seen, their mean and their variance."""
    found = []
    for layer in layers:
        like = layer.buffers["running_mean"]
        assert like is not None
        nothing = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        values, *both = layer.moments or (0, nothing, nothing)
        found += [torch.tensor(values, device=like.device), *both]
    return found


def _pooled(layers: Sequence[Layer], rows: Sequence[Sequence[Tensor]]) -> list[Layer]:
    """The layers with what all ranks have seen."""
    found = []
    for k, layer in enumerate(layers):
        each = zip(*rows[3 * k : 3 * k + 3], strict=True)
        moments = [Moments(int(values), *both) for values, *both in each if values]
        found.append(layer._replace(moments=pooled(moments)))
    return found


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
