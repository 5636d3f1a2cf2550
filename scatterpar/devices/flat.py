"""Tensors of one dtype travel as one flat tensor: one message instead of hundreds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from scatterpar.devices import verbs

__all__ = ["FlatCopy", "by_dtype"]

_ALIGNMENT = 256

_Key = TypeVar("_Key")


def by_dtype(tensors: Iterable[tuple[_Key, Tensor]]) -> dict[torch.dtype, list[_Key]]:
    """The keys of the tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[_Key]] = defaultdict(list)
    for key, tensor in tensors:
        groups[tensor.dtype].append(key)
    return groups


class FlatCopy:
    """Room for tensors that travel together: a flat buffer per dtype, and a view for each tensor.

    Views keep the strides of what they stand for (``channels_last`` stays so). Sizes that
    are multiples of large powers of two come first, so that views are aligned without
    padding and not one byte more than the tensors' own is moved.

    Args:
        like: the tensors.
        device: whose memory this is in.
        blocks: positions of tensors that lie one after the other, the first of them at the
            start of a storage of its own, which is a part of the flat buffer's memory.

    Attributes:
        order: positions of the tensors in the order in which they lie.
        views: every tensor's view.
        pieces: the same memory, 1-D.
        flats: the buffer of each dtype.
        offsets: where in it each tensor begins.
    """

    def __init__(
        self, like: Sequence[Tensor], device: torch.device, blocks: Sequence[Sequence[int]] = ()
    ) -> None:
        self.order: list[int] = []
        self.views = list(like)
        self.pieces = list(like)
        self.flats: dict[torch.dtype, Tensor] = {}
        self.offsets = [0] * len(like)
        bytes_of = [tensor.numel() * tensor.element_size() for tensor in like]
        in_blocks = {i for block in blocks for i in block}
        for dtype, alone in by_dtype(enumerate(like)).items():
            units = [list(block) for block in blocks if like[block[0]].dtype == dtype]
            units += [[i] for i in alone if i not in in_blocks]
            units.sort(key=lambda unit: -_power_of_two(sum(bytes_of[i] for i in unit)))
            positions = [i for unit in units for i in unit]
            flat = verbs.empty(sum(like[i].numel() for i in positions), dtype, device)
            self.flats[dtype] = flat
            offset = 0
            for unit in units:
                offset = self._lay(unit, like, flat, offset, own_storage=unit[0] in in_blocks)
            self.order += positions

    def _lay(
        self,
        unit: Sequence[int],
        like: Sequence[Tensor],
        flat: Tensor,
        offset: int,
        *,
        own_storage: bool,
    ) -> int:
        """Give the tensors of ``unit`` their places from ``offset`` on; where they end."""
        base, start = flat, 0
        if own_storage:
            size, start = flat.element_size(), offset
            stop = offset + sum(like[i].numel() for i in unit)
            storage = flat.untyped_storage()[offset * size : stop * size]
            base = flat.new_empty(0).set_(storage, 0, (stop - offset,), (1,))
        for i in unit:
            stop = offset + like[i].numel()
            strides = torch.empty_like(like[i], device="meta").stride()
            self.views[i] = base.as_strided(like[i].shape, strides, offset - start)
            self.pieces[i] = flat[offset:stop]
            self.offsets[i] = offset
            offset = stop
        return offset


def _power_of_two(size: int) -> int:
    """The largest power of two that divides ``size``, up to the alignment that matters."""
    return min(size & -size, _ALIGNMENT) or _ALIGNMENT
