"""What ranks show each other where a criterion sees all rows: their outputs and targets.

Nothing is pickled. A rank's parcel is a header of integers, which has the sizes of its tensors,
and then their bytes. What the tensors are part of is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.step import nested
from scatterpar.step.nested import join_rows

__all__ = ["Shown"]

_INTEGER_BYTES = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Shown:
    """One rank's outputs and targets, and how the other ranks' are read.

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
        return torch.cat([_bytes(tensor).to(device) for tensor in (header, *tensors)])

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
        end = (2 + dimensions) * _INTEGER_BYTES
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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
