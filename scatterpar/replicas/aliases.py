"""Tensors that overlap in memory: what a forward pass writes to one, it reads in the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scatterpar.devices import verbs
from scatterpar.devices.flat import FlatCopy

__all__ = ["in_one_storage", "like_memory", "overlapping"]

_ALIGNMENT = 16  # bytes: the largest element, a complex128


def like_memory(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Room on ``device`` for ``tensors``: one like each, and those that overlap do so there too.

    A module may register ``table`` and ``table[0]``. Copies apart from each other would let it
    read a row that it has just written in the table, as it was before.
    """
    groups = overlapping(tensors)
    together = {i for group in groups for i in group}
    alone = [i for i in range(len(tensors)) if i not in together]
    views = dict(zip(alone, FlatCopy([tensors[i] for i in alone], device).views, strict=True))
    for group in groups:
        views.update(zip(group, in_one_storage([tensors[i] for i in group], device), strict=True))
    return [views[i] for i in range(len(tensors))]


def overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of those that overlap, group by group."""
    groups: list[list[int]] = []
    reached = 0
    for start, stop, i in sorted((*_span(t), i) for i, t in enumerate(tensors) if _is_plain(t)):
        if groups and start < reached:
            groups[-1].append(i)
        else:
            groups.append([i])
        reached = max(reached, stop)
    return [group for group in groups if len(group) > 1]


def _is_plain(tensor: Tensor) -> bool:
    """Whether each of its elements has a place of its own that can be written."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.numel() > 0 and 0 not in _steps(tensor) and not tensor.is_neg()


def _steps(tensor: Tensor) -> list[int]:
    """The strides of the dimensions that have more than one element."""
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins, and where it ends."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def in_one_storage(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors that lie in a new storage as ``tensors``, which overlap, lie in theirs."""
    spans = [_span(tensor) for tensor in tensors]
    first, stop = min(start for start, _ in spans), max(stop for _, stop in spans)
    first -= first % _ALIGNMENT  # dtypes may differ
    room = verbs.empty(stop - first, torch.uint8, device).untyped_storage()
    views = [
        verbs.empty(0, tensor.dtype, device).set_(
            room, (start - first) // tensor.element_size(), tensor.shape, tensor.stride()
        )
        for tensor, (start, _) in zip(tensors, spans, strict=True)
    ]
    return [v.conj() if t.is_conj() else v for v, t in zip(views, tensors, strict=True)]
