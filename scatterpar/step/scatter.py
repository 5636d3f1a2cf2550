"""Copy rows to devices. While a micro-batch is computed, the rows of the next one are
copied::

    computed    sub-step 0   sub-step 1   sub-step 2
    copied      rows of 1    rows of 2    rows of 3

Every worker copies its own rows. Values without rows are copied once to each memory, at
the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.markers import (
    BatchList,
    Marker,
    all_tensors,
    has_markers,
    select_rows,
    unwrap_marker,
    unwrap_markers,
)
from scatterpar.devices.coalescing import iter_copies
from scatterpar.devices.transfers import Prefetcher, Transfers
from scatterpar.plan import Plan, Share

_COPIED, _NOT_COPIED = (partial(unwrap_marker, copy=copy) for copy in (True, False))
_SMALL = 2**16  # bytes; for larger tensors a separate copy costs less than packing


def micro_batches(batch: BatchList, plan: Plan, dim: int) -> Iterator[Any]:
    """Every micro-batch, share by share in order; tensors are views if possible."""
    for share in plan.shares:
        loader = ShareLoader(batch, share, dim)
        for number in range(len(share.micro_batches)):
            yield loader.rows_at_source(number)


def in_order(batches: BatchList, plan: Plan, dim: int) -> BatchList:
    """The batches with rows in the order of a plan by cost; unchanged by
    another plan.
    """
    if not plan.order:
        return batches
    ((first, batch),) = batches
    return [(first, select_rows(batch, plan.order, dim))]


def scatter(
    batch: BatchList, plan: Plan, dim: int, transfers: Transfers
) -> list[ShareLoader]:
    """A loader per share. Copies values without rows; the loaders copy
    rows when asked.
    """
    sources = {tensor.device for tensor in all_tensors(batch)}
    is_marked = has_markers(batch)
    mover, loaders = LeafMover(transfers), []
    for share in plan.shares:
        device = share.device
        if sources <= {device}:
            loaders.append(ShareLoader(batch, share, dim))
            continue
        ahead = Prefetcher(device, sources)
        # from now on a step that fails waits for its copies, too
        transfers.follow(ahead)
        moved = nested.map_leaves(partial(mover.move_rowless, device), batch)
        copies = is_marked or device in sources
        loaders.append(ShareLoader(moved, share, dim, ahead, copies=copies))
    return loaders


@dataclass
class ShareLoader:
    """The rows of one share, copied to its device when they are requested.

    Each micro-batch has its own memory, which the sub-step may write, and starts at an
    allocation boundary. With ``copies``, rows may share memory when they arrive: they
    were on the device before, are in markers, or were packed. Without ``ahead`` all
    rows are on the device.
    """

    batches: BatchList
    share: Share
    dim: int
    ahead: Prefetcher | None = None
    copies: bool = True
    arrived: dict[int, Any] = field(default_factory=dict)

    def rows_at_source(
        self, number: int, function: Callable[[Any], Any] = _NOT_COPIED
    ) -> Any:
        """The rows of one micro-batch, as views, with ``function`` applied to each
        leaf.
        """
        start, stop = self.share.micro_batches[number]
        which = -1
        while self.batches[which][0] > start:
            which -= 1
        first, value = self.batches[which]
        return select_rows(
            value, range(start - first, stop - first), self.dim, function
        )

    def load(self, number: int, *, retain: bool = False) -> Any:
        """The rows of one micro-batch after ``collate``; the next ones start to be
        copied.

        With ``retain`` the rows stay on the device for a later call.
        """
        if self.ahead is None:
            return self.rows_at_source(number, _COPIED)
        # The wait comes between the two: the next rows are issued behind these rows'
        # copies, and the sub-step must not wait for both.
        for coming in (number, number + 1):
            if coming not in self.arrived and coming < len(self.share.micro_batches):
                move = partial(move_rows, self.ahead, self.share.device)
                self.arrived[coming] = self.rows_at_source(coming, move)
                self.ahead.issue(coming)
            if coming == number:
                self.ahead.wait_on_stream(number)
        rows = self.arrived[number] if retain else self.arrived.pop(number)
        return unwrap_markers(rows, copy=True) if retain or self.copies else rows


@dataclass
class LeafMover:
    """Copies leaves to devices; each value without rows only once per device."""

    transfers: Transfers
    arrived: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    def move(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``."""
        return move_rows(self.transfers, device, self.move_rowless(device, leaf))

    def move_rowless(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device`` if it has no rows, else
        ``leaf`` itself.
        """
        if isinstance(leaf, Marker):
            move = partial(nested.map_leaves, partial(self._move_once, device))
            return leaf.map(move) if leaf.num_rows is None else leaf
        return (
            leaf
            if isinstance(leaf, Tensor) and leaf.ndim
            else self._move_once(device, leaf)
        )

    def _move_once(self, device: torch.device, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        key = (id(leaf), device)
        if key not in self.arrived:
            self.arrived[key] = self.transfers.copy(leaf, device, "scatter")
        return self.arrived[key]


def move_rows(transfers: Transfers, device: torch.device, leaf: Any) -> Any:
    """``leaf`` in the memory of ``device`` if it has rows, else ``leaf`` itself."""
    if isinstance(leaf, Marker) and leaf.num_rows is not None:
        return leaf.map(partial(_move_together, transfers, device))
    if isinstance(leaf, Tensor) and leaf.ndim and leaf.device != device:
        return transfers.copy(leaf, device, "scatter")
    return leaf


def _move_together(transfers: Transfers, device: torch.device, contents: Any) -> Any:
    """``contents`` on ``device``; small host tensors of one dtype are
    copied together.
    """
    remote = {id(t): t for t in nested.tensors(contents) if t.device != device}
    small = {key: t for key, t in remote.items() if _is_small(t)}
    arrived = {
        k: transfers.copy(t, device, "scatter")
        for k, t in remote.items()
        if k not in small
    }
    for message in iter_copies(small, device, transfers, "scatter"):
        arrived |= message
    return nested.map_leaves(lambda leaf: arrived.get(id(leaf), leaf), contents)


def _is_small(tensor: Tensor) -> bool:
    # Packing a GPU's tensors would queue work there for which the copying stream does
    # not wait.
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.nbytes <= _SMALL
