"""Sparse tensors that modules hold: they travel as the dense tensors that they are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["assembled", "is_sparse", "pieces_of"]

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


def is_sparse(tensor: Tensor) -> bool:
    """Whether ``tensor`` is made of indices and values."""
    return tensor.layout == torch.sparse_coo or tensor.layout in _COMPRESSED


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse one is made of, in its own memory.

    Raises:
        ValueError: it is trained, for which replicas have no leaf to offer.
    """
    if tensor.requires_grad:
        raise ValueError(
            f"a module holds a sparse tensor of shape {tuple(tensor.shape)} that requires grad, "
            f"which replicas cannot train; keep its values as a dense parameter and make the "
            f"sparse tensor from them in forward"
        )
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return *(indices(tensor) for indices in _COMPRESSED[tensor.layout]), tensor.values()


def assembled(like: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """A sparse tensor of ``like``'s shape and layout on these pieces' memory."""
    if like.layout == torch.sparse_coo:
        indices, values = pieces
        return torch.sparse_coo_tensor(
            indices, values, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False
        )
    outer, inner, values = pieces
    return torch.sparse_compressed_tensor(
        outer, inner, values, like.shape, layout=like.layout, check_invariants=False
    )
