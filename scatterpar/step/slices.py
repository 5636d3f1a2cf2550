"""Some rows of a batch, and how a module gets to see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.plan import Plan
from scatterpar.step import nested
from scatterpar.step.markers import Batches, Replicated, Rows, transform
from scatterpar.step.rows import sizes_of

__all__ = ["copied", "micro_batches", "opened", "own", "take", "together"]


def take(value: Any, start: int, stop: int, dim: int) -> Any:
    """Rows ``start:stop`` of every tensor in ``value``: views.

    0-dim tensors are copied always: no two takers share one. Markers stay, with fewer rows.
    """
    return nested.transform(lambda leaf: _slice(leaf, start, stop, dim), value)


def own(value: Any, start: int, stop: int, dim: int) -> Any:
    """Copies of rows ``start:stop``, as a module or criterion sees them, which may be written."""

    def one(leaf: Any) -> Any:
        rows = _slice(leaf, start, stop, dim)
        return rows.clone() if isinstance(rows, Tensor) else opened(copied(rows))

    return nested.transform(one, value)


def copied(value: Any) -> Any:
    """``value`` with copies of all its tensors; markers stay."""
    return transform(_clone, value)


def opened(value: Any, *, copy: bool = False) -> Any:
    """``value`` as a module or criterion sees it: its markers are gone.

    Args:
        value: the rows of one micro-batch.
        copy: copy what is replicated, so that no two sub-steps share it.
    """
    return nested.transform(lambda leaf: _opened(leaf, copy=copy), value)


def _slice(leaf: Any, start: int, stop: int, dim: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.narrow(dim, start, stop - start) if leaf.ndim else leaf.clone()
    if isinstance(leaf, Batches):
        return _slice_batches(leaf, start, stop, dim)
    if isinstance(leaf, Rows):
        return Rows(leaf.entries[start:stop], leaf.collate)
    return leaf


def _slice_batches(leaf: Batches, start: int, stop: int, dim: int) -> Batches:
    pieces, sizes, first = [], [], 0
    for batch, size in zip(leaf.entries, sizes_of(leaf, dim), strict=True):
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            pieces.append(take(batch, low, high, dim))
            sizes.append(high - low)
        first += size
    return Batches(pieces, sizes)


def _opened(leaf: Any, *, copy: bool) -> Any:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, Batches):
        (batch,) = leaf.entries  # no micro-batch reaches over the end of a batch
        return opened(batch, copy=copy)
    if isinstance(leaf, Rows):
        return leaf.entries if leaf.collate is None else leaf.collate(leaf.entries)
    if isinstance(leaf, Replicated):
        return nested.transform(_clone, leaf.value) if copy else leaf.value
    return leaf


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
