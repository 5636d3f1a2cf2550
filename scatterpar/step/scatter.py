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

from scatterpar.devices.chunks import by_dtype
from scatterpar.devices.ledger import Ahead, Ledger
from scatterpar.plan import Plan, Share
from scatterpar.step import nested
from scatterpar.step.markers import Replicated, Rows, all_tensors, opened, sliced, unmarked

Batch = Sequence[tuple[int, Any]]  # of each of several batches the first row, inputs and targets

_COPIED = partial(unmarked, copy=True)
_SMALL = 2**16  # bytes: above, a copy of its own costs less than being packed


def micro_batches(batch: Batch, plan: Plan, dim: int) -> Iterator[Any]:
    """What each micro-batch is, share by share in order; tensors are views of ``batch``'s."""
    for share in plan.shares:
        here = Arrival(batch, share, dim)
        for number in range(len(share.micro_batches)):
            yield here.at_source(number)


def scatter(batch: Batch, plan: Plan, dim: int, ledger: Ledger) -> list[Arrival]:
    """Each share's rows, which have not left yet. What has no rows is where it is needed."""
    sources = {tensor.device for tensor in [*all_tensors(batch)]}
    delivery, arrivals = Delivery(ledger), []
    for share in plan.shares:
        if sources <= {share.device}:
            arrivals.append(Arrival(batch, share, dim))
            continue
        ahead = Ahead(share.device, sources)
        ledger.follow(ahead)
        here = nested.transform(partial(delivery.bring_rowless, share.device), batch)
        marked = any(isinstance(leaf, (Rows, Replicated)) for leaf in nested.leaves(batch))
        copies = marked or share.device in sources
        arrivals.append(Arrival(here, share, dim, ahead, copies=copies))
    return arrivals


class Arrival:
    """The rows of one share, which come to its device as they are asked for.

    Each micro-batch is the sub-step's own: it begins where its memory does, and may be written.
    With ``copies`` it is copied for that, and opened: some of it was here before, or has markers,
    or entries that travelled together begin anywhere in one memory. Without ``ahead`` all of it is
    here.
    """

    def __init__(
        self, batch: Batch, share: Share, dim: int, ahead: Ahead | None = None, copies: bool = True
    ) -> None:
        self._batch, self._share, self._dim = batch, share, dim
        self._ahead, self._copies = ahead, copies
        self._arrived: dict[int, Any] = {}

    @property
    def is_here(self) -> bool:
        """Whether the caller has all rows in the share's memory."""
        return self._ahead is None

    def at_source(self, number: int) -> Any:
        """The rows of one micro-batch as ``rows_of``, where the caller has them: views."""
        return self._walk(number, partial(unmarked, copy=False))

    def _walk(self, number: int, function: Callable[[Any], Any]) -> Any:
        """What ``function`` makes of each leaf of a micro-batch's rows, in one walk."""
        start, stop = self._share.micro_batches[number]
        which = -1
        while self._batch[which][0] > start:
            which -= 1
        first, value = self._batch[which]
        start, stop, dim = start - first, stop - first, self._dim
        return nested.transform(lambda leaf: function(sliced(leaf, start, stop, dim)), value)

    def rows_of(self, number: int, *, keep: bool = False) -> Any:
        """The rows of one micro-batch as module and criterion see them; the next ones set out.

        With ``keep`` they will be asked for again, and stay.
        """
        if self._ahead is None:
            return self._walk(number, _COPIED)
        for coming in (number, number + 1):
            if coming not in self._arrived and coming < len(self._share.micro_batches):
                bring = partial(bring_rows, self._ahead, self._share.device)
                self._arrived[coming] = self._walk(coming, bring)
                self._ahead.depart(coming)
            if coming == number:
                self._ahead.arrive(number)
        rows = self._arrived[number] if keep else self._arrived.pop(number)
        return opened(rows, copy=True) if keep or self._copies else rows

    def let_go(self) -> None:
        """Keep no rows; they come again if they are asked for."""
        self._arrived.clear()


class Delivery:
    """Brings values to devices, what has no rows once to each of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._arrived: dict[tuple[int, torch.device], Tensor] = {}

    def bring(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``."""
        return bring_rows(self._ledger, device, self.bring_rowless(device, leaf))

    def bring_rowless(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``, unless it has rows."""
        if isinstance(leaf, Replicated):
            return Replicated(nested.transform(partial(self._bring_once, device), leaf.value))
        return leaf if isinstance(leaf, Tensor) and leaf.ndim else self._bring_once(device, leaf)

    def _bring_once(self, device: torch.device, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        key = (id(leaf), device)
        if key not in self._arrived:
            self._arrived[key] = self._ledger.copy(leaf, device, "scatter")
        return self._arrived[key]


def bring_rows(ledger: Ledger, device: torch.device, leaf: Any) -> Any:
    """``leaf`` in the memory of ``device``, if it has rows."""
    if isinstance(leaf, Rows):
        return Rows(_bring_entries(leaf.entries, device, ledger), leaf.collate)
    if isinstance(leaf, Tensor) and leaf.ndim and leaf.device != device:
        return ledger.copy(leaf, device, "scatter")
    return leaf


def _bring_entries(entries: list[Any], device: torch.device, ledger: Ledger) -> Any:
    """Entries on ``device``; small tensors of one dtype travel together."""
    away = {id(t): t for t in nested.tensors(entries) if t.device != device}
    small = {key: t for key, t in away.items() if _is_small(t)}
    arrived: dict[int, Tensor] = {}
    for keys in by_dtype(small.items()).values():
        group = [small[key] for key in keys]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        pieces = ledger.copy(flat, device, "scatter").split([t.numel() for t in group])
        arrived |= {key: p.view(small[key].shape) for key, p in zip(keys, pieces, strict=True)}
    for key, tensor in away.items():
        if key not in small:
            arrived[key] = ledger.copy(tensor, device, "scatter")
    return nested.transform(lambda leaf: arrived.get(id(leaf), leaf), entries)


def _is_small(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
    return plain and 0 < tensor.numel() * tensor.element_size() <= _SMALL
