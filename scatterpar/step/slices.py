"""Some rows of a batch: those of a share, or a micro-batch's as a module gets to see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.plan import Plan, Share
from scatterpar.step import nested
from scatterpar.step.markers import Batches, Replicated, Rows
from scatterpar.step.rows import sizes_of

__all__ = ["micro_batch", "micro_batches", "of_share", "opened", "take", "together"]


def take(value: Any, start: int, stop: int, dim: int, *, copy: bool = False) -> Any:
    """Rows ``start:stop`` of every tensor in ``value``: views, or with ``copy`` copies.

    0-dim tensors are copied always: no two takers share one. Markers stay, with fewer rows.
    """
    return nested.transform(lambda leaf: _slice(leaf, start, stop, dim, copy), value)


def micro_batch(value: Any, start: int, stop: int, dim: int, *, copy: bool) -> Any:
    """What a module or criterion sees of rows ``start:stop``: taken, and their markers gone.

    What is replicated is copied always: no two sub-steps share it.
    """
    if isinstance(value, Tensor):  # as nearly always: every sub-step of every replica asks
        return _slice(value, start, stop, dim, copy)

    def one(leaf: Any) -> Any:
        rows = _slice(leaf, start, stop, dim, copy)
        return rows if isinstance(rows, Tensor) else _opened(rows, copy=True)

    return nested.transform(one, value)


def opened(value: Any, *, copy: bool = False) -> Any:
    """``value`` as a module or criterion sees it: its markers are gone.

    Args:
        value: the rows of one micro-batch.
        copy: copy what is replicated, so that no two sub-steps share it.
    """
    return nested.transform(lambda leaf: _opened(leaf, copy=copy), value)


def _slice(leaf: Any, start: int, stop: int, dim: int, copy: bool) -> Any:
    if isinstance(leaf, Tensor):
        if not leaf.ndim:
            return leaf.clone()
        piece = leaf.narrow(dim, start, stop - start)
        return piece.clone() if copy else piece
    if isinstance(leaf, Batches):
        return _slice_batches(leaf, start, stop, dim, copy)
    if isinstance(leaf, Rows):
        entries = leaf.entries[start:stop]
        return Rows(nested.transform(_clone, entries) if copy else entries, leaf.collate)
    return leaf


def _slice_batches(leaf: Batches, start: int, stop: int, dim: int, copy: bool) -> Batches:
    pieces, sizes, first = [], [], 0
    for batch, size in zip(leaf.entries, sizes_of(leaf, dim), strict=True):
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            pieces.append(take(batch, low, high, dim, copy=copy))
            sizes.append(high - low)
        first += size
    return Batches(pieces, sizes)


def _opened(leaf: Any, *, copy: bool) -> Any:
    if isinstance(leaf, Batches):
        (batch,) = leaf.entries  # no micro-batch reaches over the end of a batch
        return opened(batch, copy=copy)
    if isinstance(leaf, Rows):
        return leaf.entries if leaf.collate is None else leaf.collate(leaf.entries)
    if isinstance(leaf, Replicated):
        return nested.transform(_clone, leaf.value) if copy else leaf.value
    return leaf


def of_share(leaf: Any, share: Share, dim: int) -> Any:
    """A leaf's rows of a share. Where they are not in a row, a tensor becomes several batches."""
    pieces = [_slice(leaf, start, stop, dim, copy=False) for start, stop in share.spans]
    if isinstance(leaf, Batches):
        sizes = [size for piece in pieces for size in piece.sizes]
        return Batches([batch for piece in pieces for batch in piece.entries], sizes)
    if isinstance(leaf, Rows):
        return Rows([entry for piece in pieces for entry in piece.entries], leaf.collate)
    if isinstance(leaf, Tensor) and leaf.ndim and len(pieces) > 1:
        return Batches(pieces, [piece.size(dim) for piece in pieces])
    return pieces[0]


def together(pieces: Sequence[Any], dim: int) -> Any:
    """The rows of several micro-batches as those of one; what has no rows is the first one's."""

    def one(leaves: list[Any]) -> Any:
        first = leaves[0]
        if isinstance(first, Batches):
            return Batches([together([leaf.entries[0] for leaf in leaves], dim)])
        if isinstance(first, Rows):
            return Rows([entry for leaf in leaves for entry in leaf.entries], first.collate)
        return torch.cat(leaves, dim) if isinstance(first, Tensor) and first.ndim else first

    return pieces[0] if len(pieces) == 1 else nested.merge(one, pieces)


def micro_batches(batch: Any, plan: Plan, dim: int) -> Iterator[Any]:
    """What each micro-batch is, share by share in order; tensors are views of ``batch``'s."""
    for share in plan.shares:
        for start, stop in share.micro_batches:
            yield opened(take(batch, start, stop, dim))


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
