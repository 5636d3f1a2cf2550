"""A batch to the devices, every byte once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.flat import by_dtype
from scatterpar.devices.ledger import Ledger
from scatterpar.devices.memory_search import TOO_LARGE, is_out_of_memory
from scatterpar.plan import Plan, Share
from scatterpar.step import nested
from scatterpar.step.markers import Batches, Replicated, Rows, all_tensors
from scatterpar.step.slices import of_share
from scatterpar.threads.workers import note

__all__ = ["Crossing", "is_borrowed", "scatter"]

_SMALL = 2**16  # bytes: above, a copy of its own costs less than being packed


def scatter(batch: Any, plan: Plan, dim: int, ledger: Ledger) -> list[Any]:
    """Each share's rows of ``batch`` on its device, every byte copied once.

    Where the batch already is in the share's memory, nothing moves and the share is views
    of the caller's tensors, which must then not be written. What is replicated comes once to
    each memory, however many replicas are there.
    """
    crossing = Crossing(ledger)

    def hand_over(share: Share, leaf: Any) -> Any:
        return crossing.bring(share.device, of_share(leaf, share, dim))

    scattered = []
    for share in plan.shares:
        with _noted(share):
            scattered.append(nested.transform(partial(hand_over, share), batch))
    return scattered


@contextlib.contextmanager
def _noted(share: Share) -> Iterator[None]:
    """Note on memory that runs out in the body that it is the share that does not fit."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            rows = share.stop - share.start
            note(error, f"the {rows} rows of replica {share.replica} on {share.device} {TOO_LARGE}")
        raise


class Crossing:
    """Brings a batch to devices. (Nested functions that call each other would be a cycle, and keep
    what arrived until the garbage collector runs.)

    Args:
        ledger: copies.
        takes: which leaves are to be brought, by default all.
    """

    def __init__(self, ledger: Ledger, takes: Callable[[Any], bool] | None = None) -> None:
        self._ledger = ledger
        self._takes = takes
        self._arrived: dict[tuple[int, torch.device], Any] = {}

    def bring(self, device: torch.device, leaf: Any) -> Any:
        """``leaf`` in the memory of ``device``."""
        if isinstance(leaf, Batches):
            entries = nested.transform(partial(self.bring, device), leaf.entries)
            return Batches(entries, leaf.sizes)
        if self._takes is not None and not self._takes(leaf):
            return leaf
        if isinstance(leaf, Rows):
            return Rows(_bring_entries(leaf.entries, device, self._ledger), leaf.collate)
        if isinstance(leaf, Replicated):
            return Replicated(nested.transform(partial(self._bring_once, device), leaf.value))
        return self._bring_one(device, leaf)

    def _bring_once(self, device: torch.device, leaf: Any) -> Any:
        key = (id(leaf), device)
        if key not in self._arrived:
            self._arrived[key] = self._bring_one(device, leaf)
        return self._arrived[key]

    def _bring_one(self, device: torch.device, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        return self._ledger.copy(leaf, device, "scatter")


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


def is_borrowed(value: Any, device: torch.device) -> bool:
    """Whether some tensor of a batch is in the memory of ``device`` already, and not copied."""
    devices = [tensor.device for tensor in all_tensors(value)]  # no generator: see nested.py
    return device in devices
