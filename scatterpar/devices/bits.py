"""The bits of a tensor: its dense pieces, their bytes, and whether two are equal."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

# The methods that give the dense tensors of which a sparse one consists.
_OF_ROWS = ("crow_indices", "col_indices", "values")
_OF_COLUMNS = ("ccol_indices", "row_indices", "values")
_PIECES = {
    # Not ``indices``, which refuses a tensor that is not coalesced.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _OF_ROWS,
    torch.sparse_bsr: _OF_ROWS,
    torch.sparse_csc: _OF_COLUMNS,
    torch.sparse_bsc: _OF_COLUMNS,
}


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors in a tensor: itself, or a sparse one's indices and values."""
    if tensor.layout not in _PIECES:
        return (tensor,)
    tensor = tensor.detach()
    return tuple(getattr(tensor, name)() for name in _PIECES[tensor.layout])


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor's elements, in the order of its dimensions: 1-D."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8)


_kind_with_device = attrgetter("shape", "dtype", "layout", "device")


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are in one memory, and equal in shape, dtype and bits.

    -0.0 differs from 0.0, and a NaN equals itself. Quantised tensors never count as
    equal.
    """
    if _kind_with_device(first) != _kind_with_device(second) or first.is_quantized:
        return False
    pairs = zip(pieces_of(first), pieces_of(second), strict=True)
    return all(torch.equal(as_bytes(left), as_bytes(right)) for left, right in pairs)
