"""A batch to the devices, every byte once: micro-batch by micro-batch, one ahead::

    computed    sub-step 0   sub-step 1   sub-step 2
    copied      rows of 1    rows of 2    rows of 3

Every worker brings its own rows. What has no rows goes once to each memory, at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.chunks import by_dtype
from scatterpar.devices.ledger import Ahead, Ledger
from scatterpar.plan import Plan, Share
from scatterpar.step import nested
from scatterpar.step.markers import Replicated, Rows, all_tensors, take, transform

__all__ = [
    "Arrival",
    "Delivery",
    "copied",
    "micro_batches",
    "opened",
    "rows_at",
    "scatter",
]


def rows_at(batch: Sequence[tuple[int, Any]], start: int, stop: int, dim: int) -> Any:
    """Rows ``start:stop``, of one of the batches: views; markers stay."""
    first, value = next(each for each in reversed(batch) if each[0] <= start)
    return take(value, start - first, stop - first, dim)


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


def _opened(leaf: Any, *, copy: bool) -> Any:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, Rows):
        return leaf.entries if leaf.collate is None else leaf.collate(leaf.entries)
    if isinstance(leaf, Replicated):
        return nested.transform(_clone, leaf.value) if copy else leaf.value
    return leaf


def micro_batches(batch: Sequence[tuple[int, Any]], plan: Plan, dim: int) -> Iterator[Any]:
    """What each micro-batch is, share by share in order; tensors are views of ``batch``'s."""
    for share in plan.shares:
        for start, stop in share.micro_batches:
            yield opened(rows_at(batch, start, stop, dim))


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


_SMALL = 2**16  # bytes: above, a copy of its own costs less than being packed


def scatter(
    batch: Sequence[tuple[int, Any]], plan: Plan, dim: int, ledger: Ledger
) -> list[Arrival]:
    """Each share's rows, which have not left yet. What has no rows is where it is needed.

    Args:
        batch: the first row of each batch, and its inputs and targets.
        plan: the shares.
        dim: the dimension that holds the rows.
        ledger: copies what has no rows, and follows those who copy the rest.
    """
    sources = {tensor.device for tensor in [*all_tensors(batch)]}
    marked = [leaf for leaf in nested.leaves(batch) if isinstance(leaf, (Rows, Replicated))]
    packed = any(isinstance(leaf, Rows) and leaf.collate is None for leaf in marked)
    rowless = Delivery(ledger, rows=False)
    arrivals = []
    for share in plan.shares:
        if sources <= {share.device}:
            arrivals.append(Arrival(batch, share, dim))
            continue
        ahead = Ahead(share.device, sources)
        ledger.follow(ahead)
        here = nested.transform(partial(rowless.bring, share.device), batch)
        copies = packed or share.device in sources
        arrivals.append(Arrival(here, share, dim, ahead, marked=bool(marked), copies=copies))
    return arrivals


class Arrival:
    """The rows of one share, which come to its device as they are asked for.

    Each micro-batch is the sub-step's own: it begins where its memory does, and may be written.

    Args:
        batch: the whole batch, where the caller has it.
        share: which rows these are, and how they are cut into micro-batches.
        dim: the dimension that holds the rows.
        ahead: copies them; ``None`` where all of them are in the share's memory already.
        marked: there are markers in it.
        copies: what has arrived is not the sub-step's own: some of it was here, or entries that
            travelled together begin anywhere in one memory.
    """

    def __init__(
        self,
        batch: Sequence[tuple[int, Any]],
        share: Share,
        dim: int,
        ahead: Ahead | None = None,
        *,
        marked: bool = True,
        copies: bool = False,
    ) -> None:
        self._batch = batch
        self._share = share
        self._dim = dim
        self._ahead = ahead
        self._marked = marked
        self._copies = copies
        self._delivery = None if ahead is None else Delivery(ahead, rowless=False)
        self._arrived: dict[int, Any] = {}

    @property
    def is_here(self) -> bool:
        """Whether the caller has all rows in the share's memory."""
        return self._ahead is None

    def at_source(self, number: int) -> Any:
        """The rows of one micro-batch where the caller has them."""
        return rows_at(self._batch, *self._share.micro_batches[number], self._dim)

    def rows_of(self, number: int, *, keep: bool = False) -> Any:
        """The rows of one micro-batch as module and criterion see them; the next ones set out.

        Args:
            number: of the sub-step.
            keep: the same rows will be asked for again: keep them, and give a copy.
        """
        if self._ahead is None or self._delivery is None:
            return opened(copied(self.at_source(number)))
        for coming in (number, number + 1):
            if coming not in self._arrived and coming < len(self._share.micro_batches):
                self._set_out(coming, self._ahead, self._delivery)
            if coming == number:
                self._ahead.arrive(number)
        rows = self._arrived[number] if keep else self._arrived.pop(number)
        if keep or self._copies:
            return opened(copied(rows))
        return opened(rows, copy=True) if self._marked else rows

    def _set_out(self, number: int, ahead: Ahead, delivery: Delivery) -> None:
        bring = partial(delivery.bring, self._share.device)
        self._arrived[number] = nested.transform(bring, self.at_source(number))
        ahead.depart(number)

    def let_go(self) -> None:
        """Keep no rows; they come again if they are asked for."""
        self._arrived.clear()


class Delivery:
    """Brings values to devices. (Nested functions that call each other would be a cycle, and keep
    what arrived until the garbage collector runs.)

    Args:
        ledger: copies.
        rows: bring what has rows.
        rowless: bring what has none, once to each device.
    """

    def __init__(self, ledger: Ledger, *, rows: bool = True, rowless: bool = True) -> None:
        self._ledger = ledger
        self._rows = rows
        self._rowless = rowless
        self._arrived: dict[tuple[int, torch.device], Any] = {}

    def bring(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``."""
        if isinstance(leaf, Tensor):
            if leaf.ndim:
                return self._bring_one(device, leaf) if self._rows else leaf
            return self._bring_once(device, leaf) if self._rowless else leaf
        if isinstance(leaf, Rows) and self._rows:
            return Rows(_bring_entries(leaf.entries, device, self._ledger), leaf.collate)
        if isinstance(leaf, Replicated) and self._rowless:
            return Replicated(nested.transform(partial(self._bring_once, device), leaf.value))
        return leaf

    def _bring_once(self, device: torch.device, leaf: Any) -> Any:
        key = (id(leaf), device)
        if key not in self._arrived:
            is_tensor = isinstance(leaf, Tensor)
            self._arrived[key] = self._bring_one(device, leaf) if is_tensor else leaf
        return self._arrived[key]

    def _bring_one(self, device: torch.device, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else self._ledger.copy(tensor, device, "scatter")


def _bring_entries(entries: list[Any], device: torch.device, ledger: Ledger) -> list[Any]:
    """Entries on ``device``; small tensors of one dtype travel together."""
    away = [t for t in nested.tensors(entries) if t.device != device]
    small = [t for t in away if type(t) is Tensor and t.layout == torch.strided and t.numel()]
    small = [t for t in small if t.numel() * t.element_size() <= _SMALL and t.is_contiguous()]
    arrived: dict[int, Tensor] = {}
    for positions in by_dtype(enumerate(small)).values():
        group = [small[i] for i in positions]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        pieces = ledger.copy(flat, device, "scatter").split([t.numel() for t in group])
        arrived |= {id(t): p.view(t.shape) for t, p in zip(group, pieces, strict=True)}
    for tensor in away:
        if id(tensor) not in arrived:
            arrived[id(tensor)] = ledger.copy(tensor, device, "scatter")

    def one(leaf: Any) -> Any:
        return arrived.get(id(leaf), leaf)

    return [nested.transform(one, entry) for entry in entries]
