"""Compare tensors bit by bit."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from scatterpar.devices.transfers import as_bytes, pieces_of

_kind_of = attrgetter("shape", "dtype", "layout", "device")


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are in one memory, and equal in shape, dtype and bits.

    -0.0 differs from 0.0, and a NaN equals itself. Quantised tensors never count as
    equal.
    """
    if _kind_of(first) != _kind_of(second) or first.is_quantized:
        return False
    pairs = zip(pieces_of(first), pieces_of(second), strict=True)
    return all(torch.equal(as_bytes(left), as_bytes(right)) for left, right in pairs)
