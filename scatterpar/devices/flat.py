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
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self.flats = []
        self.views = list(like)
        for dtype, positions in by_dtype(enumerate(like)).items():
            positions.sort(key=lambda i: -_power_of_two(like[i].numel() * like[i].element_size()))
            flat = verbs.empty(sum(like[i].numel() for i in positions), dtype, device)
            offset = 0
            for i in positions:
                strides = torch.empty_like(like[i], device="meta").stride()
                self.views[i] = flat.as_strided(like[i].shape, strides, offset)
                offset += like[i].numel()
            self.flats.append(flat)


def _power_of_two(size: int) -> int:
    """The largest power of two that divides ``size``, up to the alignment that matters."""
    return min(size & -size, _ALIGNMENT) or _ALIGNMENT
