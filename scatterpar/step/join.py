"""Outputs of consecutive rows, joined into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import changed
from scatterpar.step import nested

__all__ = ["join", "join_rows"]


def join(
    pieces: Sequence[Any],
    dim: int,
    weights: Sequence[float],
    has_rows: Callable[[list[Tensor]], bool] = lambda _: True,
) -> Any:
    """One value out of the pieces of consecutive rows, of the same nested types.

    Tensors are concatenated along ``dim``, or kept where one that ``has_rows`` is told of has
    none; 0-dim tensors are averaged with ``weights`` (one a piece; those with weight zero are left
    out). Other leaves are kept where all pieces have the same, and become a list with one entry a
    piece otherwise.

    >>> join([{"y": torch.zeros(2)}, {"y": torch.ones(1)}], 0, [2, 1])
    {'y': tensor([0., 0., 1.])}
    """

    def one(leaves: list[Any]) -> Any:
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return leaves[0] if _all_same(leaves) else leaves
        if not leaves[0].ndim:
            return _average(leaves, weights)
        return torch.cat(leaves, dim) if has_rows(leaves) else leaves[0]

    return pieces[0] if len(pieces) == 1 else nested.merge(one, pieces)


def join_rows(
    pieces: Sequence[Any],
    dim: int,
    weights: Sequence[float],
    rows: Sequence[int],
    *,
    strict: bool = False,
    lists: bool = False,
) -> Any:
    """``join`` of tensors that hold the rows along ``dim``, or several entries for each of them.

    One that all pieces have the same, to the bit, and whose size is not that of the rows, is kept
    once: it has nothing to do with rows, as a codebook has not.

    Args:
        pieces: the outputs of consecutive rows.
        dim: the dimension that holds the rows.
        weights: those of 0-dim tensors.
        rows: how many each piece is of.
        strict: refuse tensors that hold several entries per row along dimension 0 too, such
            as tokens of all rows in one dimension.
        lists: a list with one entry per row is joined as such.

    Raises:
        ValueError: a tensor without the rows along ``dim``, or of another shape in the others.
    """
    if lists and all(
        isinstance(piece, list) and len(piece) == n for piece, n in zip(pieces, rows, strict=True)
    ):
        return [entry for piece in pieces for entry in piece]
    ending = _KEEP if strict else _ALONE

    def has_rows(leaves: list[Tensor]) -> bool:
        sizes = [leaf.size(dim) if -leaf.ndim <= dim < leaf.ndim else None for leaf in leaves]
        if sizes != list(rows) and _same_bits(leaves):
            return False
        shapes = " and ".join(str(tuple(leaf.shape)) for leaf in leaves)
        for leaf, size, n in zip(leaves, sizes, rows, strict=True):
            flattened = not strict and dim == 0 and size is not None and size % n == 0
            if size != n and not flattened:
                raise ValueError(
                    f"an output of shape {tuple(leaf.shape)} does not have its {n} rows along "
                    f"dim={dim}, so that it cannot be joined with those of other rows; {ending}"
                )
        if len({size // n for size, n in zip(sizes, rows, strict=True) if size is not None}) > 1:
            raise ValueError(
                f"outputs of shapes {shapes} are those of {' and '.join(map(str, rows))} rows, "
                f"which is not the same number of entries for each row, so that they cannot be "
                f"joined along dim={dim}; {ending}"
            )
        if len({leaf.shape[:dim] + leaf.shape[dim:][1:] for leaf in leaves}) > 1:
            raise ValueError(
                f"outputs of shapes {shapes} cannot be joined along dim={dim}; {ending}"
            )
        return True

    return join(pieces, dim, weights, has_rows)


def _same_bits(leaves: Sequence[Tensor]) -> bool:
    first, *others = leaves
    kinds = {(leaf.shape, leaf.dtype, leaf.layout, leaf.device) for leaf in leaves}
    if len(kinds) > 1 or first.layout != torch.strided or first.is_quantized:
        return False
    return not any(changed([first] * len(others), others))


_KEEP = (
    "pass return_outputs=function: what it returns of each micro-batch's output is kept, "
    "with the rows along that dimension, or as a number"
)
_ALONE = "return the rows along that dimension, or call engine.module itself"


def _all_same(leaves: list[Any]) -> bool:
    first = leaves[0]
    if any(type(leaf) is not type(first) for leaf in leaves):
        return False
    if all(leaf is first for leaf in leaves):
        return True
    return isinstance(first, (bool, int, float, complex, str, bytes)) and all(
        leaf == first for leaf in leaves
    )


def _average(values: list[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of 0-dim tensors, in their dtype; integers become floats."""
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total = sum(weight for _, weight in counted)
    if not counted:
        return values[0]
    wide = torch.promote_types(values[0].dtype, torch.float32)
    mean = torch.stack([value.to(wide) * (weight / total) for value, weight in counted]).sum()
    is_integer = not (values[0].is_floating_point() or values[0].is_complex())
    return mean if is_integer else mean.to(values[0].dtype)
