"""A batch to the devices, every byte once: micro-batch by micro-batch, one ahead::

    computed    sub-step 0   sub-step 1   sub-step 2
    copied      rows of 1    rows of 2    rows of 3

Every worker brings its own rows. What has no rows goes once to each memory, at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import by_dtype
from scatterpar.devices.transfers import Prefetcher, Transfers
from scatterpar.plan import Plan, Share
from scatterpar.step import nested
from scatterpar.step.markers import (
    Marker,
    all_tensors,
    has_markers,
    slice_leaf,
    unwrap_marker,
    unwrap_markers,
)

Batch = Sequence[tuple[int, Any]]  # of each of several batches the first row, inputs and targets

_COPIED = partial(unwrap_marker, copy=True)
_SMALL = 2**16  # bytes: above, a copy of its own costs less than being packed


def micro_batches(batch: Batch, plan: Plan, dim: int) -> Iterator[Any]:
    """What each micro-batch is, share by share in order; tensors are views of ``batch``'s."""
    for share in plan.shares:
        here = ShareLoader(batch, share, dim)
        for number in range(len(share.micro_batches)):
            yield here.source_rows(number)


def scatter(batch: Batch, plan: Plan, dim: int, transfers: Transfers) -> list[ShareLoader]:
    """Each share's rows, which have not left yet. What has no rows is where it is needed."""
    sources = {tensor.device for tensor in [*all_tensors(batch)]}
    delivery, loaders = LeafMover(transfers), []
    for share in plan.shares:
        if sources <= {share.device}:
            loaders.append(ShareLoader(batch, share, dim))
            continue
        ahead = Prefetcher(share.device, sources)
        transfers.follow(ahead)
        here = nested.map_leaves(partial(delivery.move_rowless, share.device), batch)
        copies = share.device in sources or has_markers(batch)
        loaders.append(ShareLoader(here, share, dim, ahead, copies=copies))
    return loaders


class ShareLoader:
    """The rows of one share, which come to its device as they are asked for.

    Each micro-batch is the sub-step's own: it begins where its memory does, and may be written.
    With ``copies`` it is copied for that, and opened: some of it was here before, or has markers,
    or entries that travelled together begin anywhere in one memory. Without ``ahead`` all of it is
    here.
    """

    def __init__(
        self,
        batch: Batch,
        share: Share,
        dim: int,
        ahead: Prefetcher | None = None,
        copies: bool = True,
    ) -> None:
        self._batch, self._share, self._dim = batch, share, dim
        self._ahead, self._copies = ahead, copies
        self._arrived: dict[int, Any] = {}

    @property
    def is_local(self) -> bool:
        """Whether the caller has all rows in the share's memory."""
        return self._ahead is None

    def source_rows(self, number: int) -> Any:
        """The rows of one micro-batch as ``rows_of``, where the caller has them: views."""
        return self._walk(number, partial(unwrap_marker, copy=False))

    def _walk(self, number: int, function: Callable[[Any], Any]) -> Any:
        """What ``function`` makes of each leaf of a micro-batch's rows, in one walk."""
        start, stop = self._share.micro_batches[number]
        which = -1
        while self._batch[which][0] > start:
            which -= 1
        first, value = self._batch[which]
        start, stop, dim = start - first, stop - first, self._dim
        return nested.map_leaves(lambda leaf: function(slice_leaf(leaf, start, stop, dim)), value)

    def load(self, number: int, *, keep: bool = False) -> Any:
        """The rows of one micro-batch as module and criterion see them; the next ones set out.

        With ``keep`` they will be asked for again, and stay.
        """
        if self._ahead is None:
            return self._walk(number, _COPIED)
        for coming in (number, number + 1):
            if coming not in self._arrived and coming < len(self._share.micro_batches):
                bring = partial(move_rows, self._ahead, self._share.device)
                self._arrived[coming] = self._walk(coming, bring)
                self._ahead.issue(coming)
            if coming == number:
                self._ahead.wait_on_stream(number)
        rows = self._arrived[number] if keep else self._arrived.pop(number)
        return unwrap_markers(rows, copy=True) if keep or self._copies else rows

    def drop_rows(self) -> None:
        """Keep no rows; they come again if they are asked for."""
        self._arrived.clear()


class LeafMover:
    """Brings values to devices, what has no rows once to each of them."""

    def __init__(self, transfers: Transfers) -> None:
        self._ledger = transfers
        self._arrived: dict[tuple[int, torch.device], Tensor] = {}

    def move(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``."""
        return move_rows(self._ledger, device, self.move_rowless(device, leaf))

    def move_rowless(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``, unless it has rows."""
        if isinstance(leaf, Marker):
            if leaf.num_rows is not None:
                return leaf
            return leaf.around(nested.map_leaves(partial(self._move_once, device), leaf.contents))
        return leaf if isinstance(leaf, Tensor) and leaf.ndim else self._move_once(device, leaf)

    def _move_once(self, device: torch.device, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        key = (id(leaf), device)
        if key not in self._arrived:
            self._arrived[key] = self._ledger.copy(leaf, device, "scatter")
        return self._arrived[key]


def move_rows(transfers: Transfers, device: torch.device, leaf: Any) -> Any:
    """``leaf`` in the memory of ``device``, if it has rows."""
    if isinstance(leaf, Marker) and leaf.num_rows is not None:
        return leaf.around(_move_entries(leaf.contents, device, transfers))
    if isinstance(leaf, Tensor) and leaf.ndim and leaf.device != device:
        return transfers.copy(leaf, device, "scatter")
    return leaf


def _move_entries(entries: list[Any], device: torch.device, transfers: Transfers) -> Any:
    """Entries on ``device``; small tensors of one dtype travel together."""
    away = {id(t): t for t in nested.tensors(entries) if t.device != device}
    small = {key: t for key, t in away.items() if _is_small(t)}
    arrived: dict[int, Tensor] = {}
    for keys in by_dtype(small.items()).values():
        group = [small[key] for key in keys]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        pieces = transfers.copy(flat, device, "scatter").split([t.numel() for t in group])
        arrived |= {key: p.view(small[key].shape) for key, p in zip(keys, pieces, strict=True)}
    for key, tensor in away.items():
        if key not in small:
            arrived[key] = transfers.copy(tensor, device, "scatter")
    return nested.map_leaves(lambda leaf: arrived.get(id(leaf), leaf), entries)


def _is_small(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
    return plain and 0 < tensor.numel() * tensor.element_size() <= _SMALL
