"""What ranks send each other: gradients to be added up, and all else side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import as_bytes
from scatterpar.replicas.buffers import BatchNormUpdate, BufferPolicy, BufferValue, Moments, pooled
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step import nested
from scatterpar.step.outcome import Gradient

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SUMMED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)  # what collectives can add up; other buffers travel as bytes

# What this rank adds at a place: a gradient to all of it, what is averaged to a row; None: zeros.
_Piece = tuple[torch.dtype, torch.Size, Any, Tensor | None]


class Buckets:
    """What this rank adds to the sums of all ranks, in ``flats``: one tensor a dtype.

    Gradients, whether this rank has one or not; a flag for each that says whether it was used;
    buffers, which are rank 0's alone; and in a row for each rank what is averaged (if the policy
    combines) or pooled. They are made before anything is exchanged, so that what can fail, such
    as an allocation, fails while the other ranks can still be told.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        buffers: Sequence[BufferValue],
        layers: Sequence[BatchNormUpdate],
        rank: int,
        size: int,
        *,
        policy: BufferPolicy,
        wide: torch.dtype | None,
    ) -> None:
        self._leaves, self._layers = [leaf for leaf, _ in gradients], layers
        there = [(at, name, v.detach()) for at, name, v in buffers if v is not None]
        self._gone = [buffer for buffer in buffers if buffer[2] is None]
        self._combine = policy.combine
        self._combined = [each for each in there if policy.combine and _has_mean(each[2])]
        self._first = [each for each in there if not (policy.combine and _has_mean(each[2]))]
        self._rows = [value for *_, value in self._combined] + _moments(layers)
        pieces: list[_Piece] = [(sum_dtype(t, wide), t.shape, ..., g) for t, g in gradients]
        if gradients:
            used = torch.tensor([gradient is not None for _, gradient in gradients])
            pieces.append((pieces[0][0], used.shape, ..., used))
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
            own = [i for i, piece in enumerate(pieces) if piece[0] == dtype]
            sizes = [pieces[i][1].numel() for i in own]
            self.flats.append(torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device))
            for i, part in zip(own, self.flats[-1].split(sizes), strict=True):
                _, shape, at, mine = pieces[i]
                self._views[i] = part.view(shape)
                if mine is not None:
                    self._views[i][at].copy_(mine.detach())

    def weigh(self, factor: float) -> None:
        """Scale this rank's gradients, now that the other ranks' counts are known."""
        if self._leaves and factor != 1:
            torch._foreach_mul_(self._views[: len(self._leaves)], factor)

    def of_all(
        self, weights: Sequence[float]
    ) -> tuple[list[Gradient], list[BufferValue], list[BatchNormUpdate]]:
        """What all ranks have together, once ``flats`` are the sums; means are by ``weights``."""
        views = iter(self._views)
        totals = [next(views) for _ in self._leaves]
        used = next(views).tolist() if totals else []
        given = [total if flag else None for total, flag in zip(totals, used, strict=True)]
        buffers = [(at, name, _like(next(views), value)) for at, name, value in self._first]
        rows = [[_like(row, value) for row in next(views)] for value in self._rows]
        for (at, name, _), values in zip(self._combined, rows, strict=False):
            assert self._combine is not None
            buffers.append((at, name, self._combine(values, weights)))
        layers = _pooled(self._layers, rows[len(self._combined) :])
        return list(zip(self._leaves, given, strict=True)), [*buffers, *self._gone], layers


def pack(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """The tensors' bytes and then the numbers', flat, in the memory of the first one."""
    flat = [*map(as_bytes, tensors), as_bytes(torch.tensor(numbers))]
    return torch.cat([each.to(flat[0].device) for each in flat])


def unpack(parcel: Tensor, like: Any, numbers: int) -> tuple[Any, list[int]]:
    """What another rank has in place of the tensors in ``like``, and its first numbers.

    It packed those and, as its last numbers, the sizes of its tensors.
    """
    sizes = parcel[-8 * numbers :].clone().view(torch.int64).tolist()
    own = sum(leaf.ndim for leaf in nested.tensors(like))
    found, remaining = sizes[: numbers - own], iter(sizes[numbers - own :])
    end = 0

    def read(leaf: Tensor) -> Tensor:
        nonlocal end
        shape = [next(remaining) for _ in leaf.shape]
        start, end = end, end + math.prod(shape) * leaf.itemsize
        return parcel[start:end].clone().view(leaf.dtype).view(shape).to(leaf.device)

    return nested.map_tensors(read, like), found


def kind_of(value: Any, dim: int) -> str:
    """What must be the same on all ranks, of whatever number of rows."""
    return ";".join([_kind(leaf, dim) for leaf in nested.leaves(value)])


def _kind(leaf: Any, dim: int) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
    others = list(leaf.shape)
    if -len(others) <= dim < len(others):
        others[dim] = -1
    return f"{leaf.dtype}{others}"


def _summable(value: Tensor) -> Tensor:
    """What collectives can add up: the bytes of a dtype that they cannot."""
    return value if value.dtype in _SUMMED else as_bytes(value)


def _like(total: Tensor, value: Tensor) -> Tensor:
    """``total`` as what ``value`` was made summable from."""
    if total.dtype == value.dtype:
        return total
    return total.clone().view(value.dtype).view(value.shape)  # a copy begins where any dtype may


def _has_mean(value: Tensor) -> bool:
    return value.dtype in _SUMMED and not value.is_complex()


def _moments(layers: Sequence[BatchNormUpdate]) -> list[Tensor]:
    """How many values the layers have seen; and of each their mean and their variance."""
    moments = []
    for layer in layers:
        like = layer.buffers["running_mean"]
        assert like is not None
        nothing = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        moments.append(layer.moments or Moments(0, nothing, nothing))
    both = [tensor for own in moments for tensor in own[1:]]
    if not both:
        return []
    return [torch.tensor([own.values for own in moments], device=both[0].device), *both]


def _pooled(
    layers: Sequence[BatchNormUpdate], rows: Sequence[Sequence[Tensor]]
) -> list[BatchNormUpdate]:
    """The layers with what all ranks have seen."""
    found: list[list[Moments]] = [[] for _ in layers]
    for counts, *both in zip(*rows, strict=True):
        for k, count in enumerate(counts.tolist()):
            if count:
                found[k].append(Moments(count, *both[2 * k : 2 * k + 2]))
    return [layer._replace(moments=pooled(own)) for layer, own in zip(layers, found, strict=True)]
