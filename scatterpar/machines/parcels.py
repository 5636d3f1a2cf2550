"""What ranks send each other: gradients with buffers, and outputs for a criterion that sees all.

``Parcel`` is added up, one collective a dtype; ``Shown`` is put side by side. Nothing is pickled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.replicas.buffers import BufferValue, Layer, Moments, pooled
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step import nested
from scatterpar.step.nested import join_rows
from scatterpar.torch_private import unflatten

__all__ = ["Parcel", "Shown", "pack", "pooled_over_ranks", "table_of"]

_SUMMED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)  # what collectives can add up; other buffers travel as bytes
_BYTES = torch.uint8
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Gradient = tuple[Tensor, Tensor | None]


class Parcel:
    """One flat tensor: gradients, a flag for each that says whether it was used, buffers.

    It is made before anything is exchanged, so that what can fail, such as an allocation,
    fails while the other ranks can still be told.

    Args:
        dtype: of the flat tensor.
        gradients: of that dtype, by their number.
        buffers: that travel along, by their number.
        first: this is rank 0, whose buffers win.
        mean: floating-point buffers are averaged over the ranks instead.
        table: a row of bytes for each rank, of which this one has filled its own.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        gradients: dict[int, Gradient],
        buffers: dict[int, BufferValue],
        first: bool,
        mean: bool,
        table: Tensor | None = None,
    ) -> None:
        self._gradients = gradients
        self._buffers = buffers
        self._table = table
        self._mean = mean and dtype != _BYTES and not dtype.is_complex
        self._first = first
        values = [self._share(buffer, dtype) for buffer in buffers.values()]
        values += [] if table is None else [table.flatten()]
        device = next(iter([*(t for t, _ in gradients.values()), *values])).device
        sizes = [tensor.numel() for tensor, _ in gradients.values()]
        self._ends = sum(sizes), sum(sizes) + len(sizes)
        total = self._ends[1] + sum(value.numel() for value in values)
        self.flat = torch.zeros(total, dtype=dtype, device=device)
        grads, flags, rest = self._parts()
        for view, (_, gradient) in zip(grads.split(sizes), gradients.values(), strict=True):
            if gradient is not None:
                view.view(gradient.shape).copy_(gradient.detach())
        flags.copy_(torch.tensor([gradient is not None for _, gradient in gradients.values()]))
        for view, value in zip(rest.split([v.numel() for v in values]), values, strict=True):
            view.copy_(value)

    def weigh(self, gradients: float, buffers: float) -> None:
        """Scale this rank's part of the sum, now that the other ranks' parts are known."""
        grads, _, rest = self._parts()
        if self._gradients and gradients != 1:
            grads.mul_(gradients)
        if self._mean:
            rest.mul_(buffers)

    def unpack(self) -> tuple[dict[int, Gradient], dict[int, BufferValue]]:
        """The gradients and buffers of all ranks, once ``flat`` is the sum."""
        grads, flags, rest = self._parts()
        tensors = [tensor for tensor, _ in self._gradients.values()]
        parts = unflatten(grads, tensors) if tensors else ()
        found = zip(self._gradients.items(), parts, flags.tolist(), strict=True)
        gradients = {i: (tensor, part if flag else None) for (i, (tensor, _)), part, flag in found}
        sizes = [self._size(buffer) for buffer in self._buffers.values()]
        views = rest[: sum(sizes)].split(sizes) if sizes else ()
        settled = {
            i: self._settle(buffer, view)
            for (i, buffer), view in zip(self._buffers.items(), views, strict=True)
        }
        if self._table is not None:
            self._table.copy_(rest[sum(sizes) :].view(self._table.shape))
        return gradients, settled

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        used, flagged = self._ends
        return self.flat[:used], self.flat[used:flagged], self.flat[flagged:]

    def _size(self, buffer: BufferValue) -> int:
        value = _value(buffer)
        return value.numel() * (value.element_size() if self.flat.dtype == _BYTES else 1)

    def _share(self, buffer: BufferValue, dtype: torch.dtype) -> Tensor:
        """What this rank adds to the sum that the buffer comes out of."""
        value = _value(buffer)
        if self._mean:
            base = _base(buffer)
            return torch.where(value == base, 0, value - base).reshape(-1)
        flat = _flat_bytes(value) if dtype == _BYTES else value.reshape(-1)
        return flat if self._first else torch.zeros_like(flat)

    def _settle(self, buffer: BufferValue, total: Tensor) -> BufferValue:
        value = _value(buffer)
        if self._mean:
            total = (_base(buffer) + total.view(value.shape)).to(value.dtype)
        elif total.dtype != value.dtype:
            total = total.clone().view(value.dtype)
        return (*buffer[:2], total.view(value.shape))


def pack(
    gradients: Sequence[Gradient],
    buffers: Sequence[BufferValue],
    first: bool,
    mean: bool,
    wide: torch.dtype | None,
    table: Tensor | None,
) -> list[Parcel]:
    """One parcel per dtype, in an order that is the same on all ranks.

    Gradients travel in the dtype that they add up in, whether this rank has one or not. What
    ``table`` gets from the other ranks, it has once all parcels are unpacked.
    """
    parts: dict[torch.dtype, tuple[dict[int, Gradient], dict[int, BufferValue]]]
    parts = defaultdict(lambda: ({}, {}))
    for i, pair in enumerate(gradients):
        parts[sum_dtype(pair[0], wide)][0][i] = pair
    for i, buffer in enumerate(buffers):
        if buffer[2] is not None:
            dtype = buffer[2].dtype
            parts[dtype if dtype in _SUMMED else _BYTES][1][i] = buffer
    if table is not None:
        parts[_BYTES]  # may be there for nothing else
    return [
        Parcel(dtype, *both, first, mean, table if dtype == _BYTES else None)
        for dtype, both in parts.items()
    ]


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


def _value(buffer: BufferValue) -> Tensor:
    assert buffer[2] is not None, "only buffers that exist are packed"
    return buffer[2].detach()


def _base(buffer: BufferValue) -> Tensor:
    """What all ranks count the change of an averaged buffer from.

    From its value before the step, so that what does not change stays as it is to the bit;
    from zero where that is not finite, as in a running minimum that starts at infinity.
    """
    before = buffer[0][buffer[1]]
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
