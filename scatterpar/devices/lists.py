"""Lists of tensors for torch's ``_foreach`` operators, in which each list is a few kernels.

That is so for tensors of one dtype whose partners have the same strides. One pair that is
otherwise, such as a batch normalisation's integer, gives every tensor a kernel of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_each", "copy_each", "copy_lists", "grouped"]

Pairs = tuple[list[Tensor], list[Tensor]]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target, in the same memory."""
    copy_lists(grouped(targets, sources))


def copy_lists(lists: Sequence[Pairs]) -> None:
    """Copy the sources of each list, see ``grouped``, into its targets."""
    for targets, sources in lists:
        if _is_lazy(targets[0]):  # torch's operator for lists refuses these
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(targets, sources)


def add_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add every source to its target, in the same memory."""
    for pairs in grouped(targets, sources):
        torch._foreach_add_(*pairs)


def grouped(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Pairs]:
    """Targets and their sources in lists of one dtype, of equal strides or not."""
    groups: dict[Any, Pairs] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        equal = target.stride() == source.stride() and target.shape == source.shape
        group = groups[target.dtype, source.dtype, equal, _is_lazy(target)]
        group[0].append(target)
        group[1].append(source)
    return list(groups.values())


def _is_lazy(tensor: Tensor) -> bool:
    """Whether its memory holds the conjugates, or the negatives, of its elements."""
    return tensor.is_conj() or tensor.is_neg()
