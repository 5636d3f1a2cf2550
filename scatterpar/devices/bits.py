"""Whether tensors hold the same bits: -0.0 is not 0.0, and a NaN is equal to itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["changed", "changes", "differing"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Which elements of two dense tensors of one shape and dtype differ: a mask of that shape.

    >>> differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    tensor([ True, False])
    """
    if one.is_complex():
        reals = [torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other)]
        return differing(*reals).any(-1)
    return _as_integers(one.detach()) != _as_integers(other.detach())


def changes(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """For each pair of dense tensors in one memory a flag there: whether any bit differs."""
    return [differing(one, other).any() for one, other in zip(ones, others, strict=True)]


def changed(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """The same on the host, which waits once for all of them."""
    found = changes(ones, others)
    return torch.stack(found).tolist() if found else []


def _as_integers(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])
