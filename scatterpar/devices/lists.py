"""Lists of tensors for torch's ``_foreach`` operators, in which each list is a few kernels.

That is so for tensors of one dtype whose partners have the same strides. One pair that is
otherwise, such as a batch normalisation's integer, gives every tensor a kernel of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_each", "copy_each"]


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target, in the same memory."""
    _in_groups(torch._foreach_copy_, targets, sources)


def add_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add every source to its target, in the same memory."""
    _in_groups(torch._foreach_add_, targets, sources)


def _in_groups(
    function: Callable[[list[Tensor], list[Tensor]], Any],
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
) -> None:
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        alike = target.stride() == source.stride() and target.shape == source.shape
        group = groups[target.dtype, source.dtype, alike]
        group[0].append(target)
        group[1].append(source)
    for pair in groups.values():
        function(*pair)
