"""Copy rows to devices. While rows are computed, the next ones are copied::

    computed    sub-step 0   sub-step 1   sub-step 2
    copied      rows of 1    rows of 2    rows of 3

Every worker copies its own rows. Those of the first sub-step arrive while parameters
are sent, if sub-steps are replayed and the host takes no part in the copy
(``start_arrival``). Values without rows are copied once to each memory, at the
beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.batch import Batch
from scatterpar.batch.classes import like
from scatterpar.batch.markers import Marker
from scatterpar.devices.coalescing import iter_copies
from scatterpar.devices.streams import use_device
from scatterpar.devices.transfers import Prefetcher, Transfers
from scatterpar.plan import Plan, Share
from scatterpar.step.replica_threads import ReplicaNote

_MAX_PACKED_BYTES = (
    2**16
)  # bytes; for larger tensors a separate copy costs less than packing


def micro_batches(batches: Sequence[Batch], plan: Plan) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs and targets of every micro-batch, share by share.

    Tensors are views if possible.
    """
    for share in plan.shares:
        loader = ShareLoader(batches, share)
        for sub_step in range(len(share.micro_batches)):
            yield loader.at_source(sub_step).unwrapped()


def scatter(
    batches: Sequence[Batch], plan: Plan, transfers: Transfers
) -> list[ShareLoader]:
    """Copy values without rows to the devices. Returns a loader per share.

    The loaders copy rows when they are requested.
    """
    sources: set[torch.device] = set()
    is_marked = False
    for batch in batches:
        sources |= batch.devices()
        is_marked |= bool(batch.markers)
    values = Values(transfers)
    loaders: list[ShareLoader] = []
    for share in plan.shares:
        device = share.device
        # Rows that are there already are sliced, not copied.
        if sources <= {device}:
            loaders.append(ShareLoader(batches, share))
            continue
        ahead = Prefetcher(device, sources)
        # From now on a step that fails waits for its copies, too.
        transfers.follow(ahead)
        # Before any rows, because the first sub-step needs the values, too.
        with_values = [values.on(device, batch) for batch in batches]
        # What a copy has brought here, nobody else uses: a sub-step may write it.
        copies = is_marked or device in sources
        loaders.append(ShareLoader(with_values, share, ahead, copies=copies))
    return loaders


def start_arrival(loaders: Sequence[ShareLoader]) -> None:
    """Start to copy the rows of the first sub-step, before the replicas' threads begin.

    ::

        caller     start   parameters are sent    threads begin
        device             rows arrive            compute

    Not the rows from pageable memory, which the host copies to pinned memory: several
    threads do that at the same time. Nor those of a second share on a device, which is
    computed after the first one. Parameters that GPUs pass on to each other arrive
    after the rows.
    """
    started: set[torch.device] = set()
    for loader in loaders:
        share = loader.share
        if share.device not in started:
            started.add(share.device)
            with ReplicaNote(share, 0), use_device(share.device, ()):
                loader.start()


@dataclass
class ShareLoader:
    """The rows of one share, copied to its device when they are requested.

    Each micro-batch has its own memory, which the sub-step may write, and starts at an
    allocation boundary.

    Attributes:
        batches: where the rows are; values without rows are on the device.
        share: the rows.
        ahead: copies rows ahead of use; ``None`` if all rows are on the device.
        copies: whether rows may share memory when they arrive: they were on the device
            before, are in markers, or were packed.
        arrived: the micro-batches on the device, by the number of their sub-step.
    """

    batches: Sequence[Batch]
    share: Share
    ahead: Prefetcher | None = None
    copies: bool = True
    arrived: dict[int, Batch] = field(default_factory=dict)

    def at_source(self, sub_step: int) -> Batch:
        """The rows of one micro-batch where they are, as views."""
        # No micro-batch has rows of two batches: the last one that begins before it.
        start, stop = self.share.micro_batches[sub_step]
        for batch in reversed(self.batches):
            if batch.first_row <= start:
                break
        return batch.select(range(start - batch.first_row, stop - batch.first_row))

    def start(self) -> None:
        """Start to copy the first micro-batch, if the host takes no part in that."""
        if self.ahead is None:
            return
        rows = self.at_source(0)
        # What is in a marker may be packed first, by the host.
        if not rows.markers and all(map(self.ahead.is_direct, rows.tensors())):
            self._request_rows(rows, 0, self.ahead)
            self.ahead.issue(0)

    def load(
        self, sub_step: int, *, retain: bool = False, holds_next: bool = False
    ) -> tuple[Any, Any]:
        """Load the inputs and targets of one micro-batch; start to copy the next ones.

        With ``retain`` the rows stay on the device for a later call. With
        ``holds_next``, the copies of the next rows start in ``issue_next``.
        """
        if self.ahead is None:
            # A copy: these rows are the caller's tensors, which are never written.
            return self.at_source(sub_step).unwrapped(copy=True)
        # The wait comes between the two: the next rows are issued behind these rows'
        # copies, and the sub-step must not wait for both.
        self._issue(sub_step, self.ahead)
        self.ahead.wait_on_stream(sub_step)
        if not holds_next:
            self._issue(sub_step + 1, self.ahead)
        elif self._request(sub_step + 1, self.ahead):
            self.ahead.hold()
        if retain:
            return self.arrived[sub_step].unwrapped(copy=True)
        return self.arrived.pop(sub_step).unwrapped(copy=self.copies)

    def issue_next(self, sub_step: int) -> None:
        """Start to copy the rows of the next micro-batch, after ``holds_next``."""
        if self.ahead is not None:
            self.ahead.issue(sub_step + 1)

    def _issue(self, sub_step: int, ahead: Prefetcher) -> None:
        """Start to copy the rows of a micro-batch, unless they have been copied."""
        if self._request(sub_step, ahead):
            ahead.issue(sub_step)

    def _request(self, sub_step: int, ahead: Prefetcher) -> bool:
        """Request the rows of a micro-batch. Returns whether there are rows to copy."""
        if sub_step in self.arrived or sub_step >= len(self.share.micro_batches):
            return False
        self._request_rows(self.at_source(sub_step), sub_step, ahead)
        return True

    def _request_rows(self, rows: Batch, sub_step: int, ahead: Prefetcher) -> None:
        move = partial(rows_on_device, ahead, self.share.device)
        self.arrived[sub_step] = rows.map_rows(move)


class Values:
    """Copies values without rows to devices, each value once per device."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        # By id of the source; the batch that is moved keeps it alive.
        self._arrived: dict[tuple[int, torch.device], Tensor] = {}

    def on(self, device: torch.device, batch: Batch) -> Batch:
        """The batch with its values without rows in the memory of ``device``."""
        return batch.map_values(partial(self._leaf_on, device))

    def _leaf_on(self, device: torch.device, leaf: Any) -> Any:
        copy_once = partial(self._copied_once, device)
        if isinstance(leaf, Marker):
            return leaf.map(partial(nested.map_tensors, copy_once))
        return copy_once(leaf)

    def _copied_once(self, device: torch.device, tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        # Shares on one device, and tensors that appear twice, need one copy.
        key = (id(tensor), device)
        if key not in self._arrived:
            arrived = self._transfers.copy(tensor, device, "scatter")
            self._arrived[key] = like(tensor, arrived)
        return self._arrived[key]


def batch_on_device(batch: Batch, device: torch.device, transfers: Transfers) -> Batch:
    """The whole batch in the memory of ``device``."""
    with_values = Values(transfers).on(device, batch)
    return with_values.map_rows(partial(rows_on_device, transfers, device))


def rows_on_device(transfers: Transfers, device: torch.device, leaf: Any) -> Any:
    """A tensor or marker with rows in the memory of ``device``."""
    if isinstance(leaf, Marker):
        return leaf.map(partial(copied_together, transfers, device))
    if leaf.device == device:
        return leaf
    return like(leaf, transfers.copy(leaf, device, "scatter"))


def copied_together(transfers: Transfers, device: torch.device, contents: Any) -> Any:
    """``contents`` on ``device``; small host tensors of one dtype share a copy."""
    arrived: dict[int, Tensor] = {}  # by id of the source
    small: dict[int, Tensor] = {}
    for tensor in nested.tensors(contents):
        if tensor.device == device:
            continue
        if _is_small(tensor):
            small[id(tensor)] = tensor
        elif id(tensor) not in arrived:
            copy = transfers.copy(tensor, device, "scatter")
            arrived[id(tensor)] = like(tensor, copy)
    for message in iter_copies(small, device, transfers, "scatter"):
        arrived |= message
    return nested.map_atoms(lambda leaf: arrived.get(id(leaf), leaf), contents)


def _is_small(tensor: Tensor) -> bool:
    # A class and attributes are kept by a copy of its own.
    is_plain = type(tensor) is Tensor and not vars(tensor)
    if not is_plain or tensor.layout != torch.strided:
        return False
    # Packing a GPU's tensors would queue work there for which the copying stream does
    # not wait.
    return tensor.device.type == "cpu" and tensor.nbytes <= _MAX_PACKED_BYTES
