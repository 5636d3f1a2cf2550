"""What ranks send each other: gradients with buffers, and outputs for a criterion that sees all.

``Parcels`` are added up, one collective a dtype; ``Shown`` is put side by side. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.replicas.buffers import BufferValue, Layer, Moments, Place, pooled
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step import nested
from scatterpar.step.nested import join_rows

__all__ = ["Parcels", "Shown", "pooled_over_ranks", "table_of"]

_SUMMED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)  # what collectives can add up; other buffers travel as bytes
_BYTES = torch.uint8
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Gradient = tuple[Tensor, Tensor | None]
_Piece = tuple[torch.dtype, torch.Size, Tensor | None]  # what this rank adds; nothing: zeros


class Parcels:
    """What this rank adds to the sums of all ranks: one flat tensor a dtype.

    Gradients, in the dtype that they add up in, whether this rank has one or not; a flag for each
    that says whether it was used; buffers; and a table. They are made before anything is exchanged,
    so that what can fail, such as an allocation, fails while the other ranks can still be told.

    Args:
        gradients: leaves, and their dense gradients.
        buffers: that travel along.
        table: a row of bytes for each rank, of which this one has filled its own.
        first: this is rank 0, whose buffers win.
        mean: floating-point buffers are averaged over the ranks instead.
        wide: gradients add up in this dtype, where their own is narrower.

    Attributes:
        flats: the flat tensors, in an order that is the same on all ranks.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        buffers: Sequence[BufferValue],
        table: Tensor | None,
        *,
        first: bool,
        mean: bool,
        wide: torch.dtype | None,
    ) -> None:
        self._leaves = [leaf for leaf, _ in gradients]
        self._buffers = [(at, name, v.detach()) for at, name, v in buffers if v is not None]
        self._gone = [buffer for buffer in buffers if buffer[2] is None]
        self._bases = [_base(*buffer) if mean else None for buffer in self._buffers]
        pieces: list[_Piece] = [(sum_dtype(t, wide), t.shape, g) for t, g in gradients]
        for buffer, base in zip(self._buffers, self._bases, strict=True):
            share = _share(buffer[2], base)
            pieces.append((share.dtype, share.shape, share if first or base is not None else None))
        if gradients:
            used = torch.tensor([gradient is not None for _, gradient in gradients])
            pieces.append((pieces[0][0], used.shape, used))
        if table is not None:
            pieces.append((table.dtype, table.shape, table))
        self.flats: list[Tensor] = []
        self._views = [torch.empty(0)] * len(pieces)
        tensors = (*self._leaves, *(value for *_, value in self._buffers), table)
        device = next((tensor.device for tensor in tensors if tensor is not None), None)
        for dtype in dict.fromkeys(dtype for dtype, *_ in pieces):
            own = {i: piece for i, piece in enumerate(pieces) if piece[0] == dtype}
            sizes = [shape.numel() for _, shape, _ in own.values()]
            self.flats.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
            parts = self.flats[-1].split(sizes)
            for (i, (_, shape, mine)), part in zip(own.items(), parts, strict=True):
                self._views[i] = part.view(shape)
                if mine is not None:
                    self._views[i].copy_(mine.detach())

    def weigh(self, gradients: float, buffers: float) -> None:
        """Scale this rank's part of the sums, now that the other ranks' parts are known."""
        count = len(self._leaves)
        pairs = zip(self._views[count:], self._bases, strict=False)
        averaged = [view for view, base in pairs if base is not None]
        for views, factor in ((self._views[:count], gradients), (averaged, buffers)):
            if views and factor != 1:
                torch._foreach_mul_(views, factor)

    def sums(self) -> tuple[list[Gradient], list[BufferValue], Tensor | None]:
        """The gradients and buffers of all ranks and the table, once ``flats`` are the sums."""
        views = iter(self._views)
        totals = [next(views) for _ in self._leaves]
        buffers = [
            (holder, name, _settled(value, base, next(views)))
            for (holder, name, value), base in zip(self._buffers, self._bases, strict=True)
        ]
        flags = next(views).tolist() if totals else []
        given = [total if flag else None for total, flag in zip(totals, flags, strict=True)]
        gradients = list(zip(self._leaves, given, strict=True))
        return gradients, [*buffers, *self._gone], next(views, None)


def table_of(layers: Sequence[Layer], rank: int, size: int) -> Tensor | None:
    """A row for each rank, filled for this one: what its batch normalisations have seen, as bytes.

    Counts first, then means and variances.
    """
    if not layers:
        return None
    moments = [layer.moments or _nothing_like(layer) for layer in layers]
    means = [tensor for one in moments for tensor in one[1:]]
    counts = torch.tensor([one.values for one in moments], device=means[0].device)
    row = torch.cat([tensor.detach().view(_BYTES) for tensor in (counts, *means)])
    table = row.new_zeros(size, len(row))
    table[rank] = row
    return table


def pooled_over_ranks(layers: Sequence[Layer], table: Tensor | None) -> list[Layer]:
    """The layers with what all ranks have seen, once their rows are there."""
    if table is None:
        return list(layers)
    likes = [_nothing_like(layer).mean for layer in layers]
    sizes = [like.numel() * like.element_size() for like in likes for _ in "mv"]
    found: list[list[Moments]] = [[] for _ in layers]
    for row in table:
        counts, *parts = row.split([8 * len(layers), *sizes])
        for i, count in enumerate(counts.clone().view(torch.int64).tolist()):
            if count:
                both = (part.clone().view(likes[i].dtype) for part in parts[2 * i : 2 * i + 2])
                found[i].append(Moments(count, *both))
    return [layer._replace(moments=pooled(own)) for layer, own in zip(layers, found, strict=True)]


def _nothing_like(layer: Layer) -> Moments:
    like = layer.buffers["running_mean"]
    assert like is not None
    zeros = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    return Moments(0, zeros, zeros)


def _share(value: Tensor, base: Tensor | None) -> Tensor:
    """What a buffer comes out of when all ranks' ones are added up."""
    if base is not None:
        return torch.where(value == base, 0, value - base).to(value.dtype)
    return value if value.dtype in _SUMMED else _flat_bytes(value)


def _settled(value: Tensor, base: Tensor | None, total: Tensor) -> Tensor:
    """The buffer's value after the step."""
    if base is not None:
        return (base + total).to(value.dtype)
    if total.dtype != value.dtype:
        total = total.clone().view(value.dtype).view(value.shape)
    return total


def _base(place: Place, name: str, value: Tensor) -> Tensor | None:
    """What all ranks count the change of an averaged buffer from; ``None`` where there is no mean.

    From its value before the step, so that what does not change stays as it is to the bit;
    from zero where that is not finite, as in a running minimum that starts at infinity.
    """
    if value.dtype not in _SUMMED or value.is_complex():
        return None
    before = place.get(name)
    assert before is not None
    return torch.where(before.isfinite(), before, 0).detach()


class Shown:
    """One rank's outputs and targets, and how the other ranks' are read.

    A rank's bytes are a header of integers, which has the sizes of its tensors, and then those of
    the tensors. What the tensors are part of is the same on every rank.

    Args:
        pieces: the outputs in row order, on the master.
        rows: the rows of each piece.
        targets: the targets, on the master.
        dim: the dimension that holds the rows.
    """

    def __init__(self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int) -> None:
        self._pieces, self._rows, self._dim = pieces, rows, dim
        detached = [nested.transform(_detached, piece) for piece in pieces]
        self._own = join_rows(detached, dim, rows, rows), targets

    @property
    def kind(self) -> str:
        """What must be the same on all ranks."""
        return ";".join([_kind(leaf, self._dim) for leaf in nested.leaves(self._own)])

    def pack(self, seed: int) -> Tensor:
        """A flat tensor of bytes, in the master's memory."""
        tensors = list(nested.tensors(self._own))
        sizes = [size for tensor in tensors for size in tensor.shape]
        header = torch.tensor([seed, sum(self._rows), *sizes])
        device = tensors[0].device if tensors else header.device
        return torch.cat([_flat_bytes(tensor).to(device) for tensor in (header, *tensors)])

    def of_all(
        self, parcels: Sequence[Tensor], rank: int
    ) -> tuple[tuple[list[Any], list[int], Any], int]:
        """Pieces, rows and targets of the whole batch, and rank 0's seed.

        Args:
            parcels: what each rank packed.
            rank: this one, whose own pieces come back as they are.
        """
        pieces: list[Any] = []
        rows: list[int] = []
        targets: list[Any] = []
        seeds: list[int] = []
        for number, parcel in enumerate(parcels):
            (output, target), seed, count = self._unpack(parcel)
            pieces += self._pieces if number == rank else [output]
            rows += self._rows if number == rank else [count]
            targets.append(target)
            seeds.append(seed)
        return (pieces, rows, nested.merge(self._join_targets, targets)), seeds[0]

    def _unpack(self, parcel: Tensor) -> tuple[Any, int, int]:
        dimensions = sum([tensor.ndim for tensor in nested.tensors(self._own)])
        end = (2 + dimensions) * 8
        seed, rows, *sizes = parcel[:end].clone().view(torch.int64).tolist()
        remaining = iter(sizes)

        def read(leaf: Any) -> Any:
            nonlocal end
            if not isinstance(leaf, Tensor):
                return leaf
            shape = torch.Size([next(remaining) for _ in range(leaf.ndim)])
            start, end = end, end + shape.numel() * leaf.element_size()
            return parcel[start:end].clone().view(leaf.dtype).view(shape).to(leaf.device)

        return nested.transform(read, self._own), seed, rows

    def _join_targets(self, leaves: list[Any]) -> Any:
        """Targets without rows are rank 0's."""
        has_rows = isinstance(leaves[0], Tensor) and leaves[0].ndim
        return torch.cat(leaves, self._dim) if has_rows else leaves[0]


def _kind(leaf: Any, dim: int) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
    others = list(leaf.shape)
    if others:
        others[dim] = -1
    return f"{leaf.dtype}{others}"


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(_BYTES)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
