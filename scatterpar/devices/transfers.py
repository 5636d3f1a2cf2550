"""The copies of a step between memories, counted, and issued ahead of use."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from scatterpar.devices.bits import pieces_of
from scatterpar.devices.copies import to_device, write
from scatterpar.devices.streams import (
    has_streams,
    record_event,
    stream_for,
    use_device,
)

PHASES = ("scatter", "replicate", "compute", "reduce")
_MAX_PINNED = 2  # copy groups in the host's pinned memory at the same time
# Streams per device for copies of rows to others, of the 32 that torch has. Up to five
# more are for other copies and for graphs. With more devices, some copies share one.
_MAX_SENDERS = 24


class Transfers:
    """Copies between memories, counted by phase: all go through ``copy`` or
    ``copy_into``.

    Copies from pinned memory are asynchronous: ``synchronize`` waits for them.

    Attributes:
        bytes: the bytes copied in each phase.
        messages: the number of copies in each phase.
    """

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(PHASES, 0)
        self.messages = dict.fromkeys(PHASES, 0)
        # The last copy to each device that reads pinned memory after it was requested.
        self._pending: dict[torch.device, torch.Event] = {}
        self._followed: list[Transfers] = []

    def synchronize(self) -> None:
        """Wait until no pending copy reads its source."""
        while self._pending:
            _, event = self._pending.popitem()
            event.synchronize()
        while self._followed:
            followed = self._followed.pop()
            followed.synchronize()
            for phase in PHASES:
                self.bytes[phase] += followed.bytes[phase]
                self.messages[phase] += followed.messages[phase]

    def follow(self, transfers: Transfers) -> None:
        """Let ``synchronize`` wait for ``transfers`` too, and add its counts.

        Another thread uses ``transfers`` until then.
        """
        self._followed.append(transfers)

    def copy(self, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        """Copy ``tensor`` to the memory of ``device``, in the same memory format, and
        count it.
        """
        self.count(tensor, phase)
        non_blocking = has_streams(device)
        copied = to_device(tensor, device, copy=True, non_blocking=non_blocking)
        if non_blocking and tensor.device.type == "cpu" and tensor.is_pinned():
            # The call has returned, and the source has not been read yet.
            self._pending[device] = record_event(device)
        return copied

    def copy_into(self, target: Tensor, source: Tensor, phase: str) -> None:
        """Copy ``source`` to ``target``, which has the same size in another memory."""
        self.count(source, phase)
        write(target, source, non_blocking=has_streams(target.device))

    def count(self, tensor: Tensor, phase: str) -> None:
        """Count one copy of ``tensor``."""
        for piece in pieces_of(tensor):
            self.bytes[phase] += piece.numel() * piece.element_size()
            self.messages[phase] += 1


class Prefetcher(Transfers):
    """Copies to one device ahead of use, requested by the thread that computes there.

    ::

        copy(rows of sub-step 1); issue(1)              the copy begins
        wait_on_stream(0); compute sub-step 0           meanwhile, it goes on
        copy(rows of sub-step 2); issue(2)
        wait_on_stream(1); compute sub-step 1

    The copies between two calls of ``issue`` form a group. If the device has streams,
    groups run on one side stream of the device and one of each source, because torch
    puts a copy between devices on the current streams of both. Computation waits for a
    group only in ``wait_on_stream``. The targets are allocated on the computing stream,
    and a group waits for work launched there before ``issue``, or before ``hold`` if
    that came first, which may still read the memory's former content. Pageable host
    memory is staged in pinned memory, at most two groups at a time. The streams of
    ``sources``, the devices of the tensors, first wait for work that was queued there
    when this object was made.
    """

    def __init__(
        self, device: torch.device, sources: Iterable[torch.device] = ()
    ) -> None:
        super().__init__()
        self._requested: list[tuple[Tensor, Tensor]] = []  # sources and their targets
        # What the next group waits for; ``None`` for all that is launched by then.
        self._after: torch.Event | None = None
        # By number of the group: an event that completes with it, and its targets. If
        # they were freed earlier, copies would write freed memory.
        self._groups: dict[int, tuple[torch.Event, list[Tensor]]] = {}
        # The events of the groups that are staged; each new one drops the oldest.
        self._pinned: deque[torch.Event] = deque(maxlen=_MAX_PINNED)
        # An abandoned worker may call ``issue`` while another thread synchronizes.
        self._lock = threading.Lock()
        self._device = device
        self._stream = stream_for("arriving", device)
        self._senders: dict[torch.device, torch.Stream] = {}
        use = "sending", (device.index or 0) % _MAX_SENDERS
        for source in sources:
            if self._stream is None or source == device:
                continue
            sender = stream_for(use, source)
            if sender is not None:
                # It may still compute the rows.
                sender.wait_stream(torch.accelerator.current_stream(source))
                self._senders[source] = sender

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # no caller could handle an error here
            if self._groups:
                self.synchronize()

    def synchronize(self) -> None:
        """Wait for all issued copies."""
        super().synchronize()
        if self._stream is None:
            return
        # The device first: else torch, leaving the stream, enters the caller's own
        # device.
        with self._lock, use_device(self._device, ()), self._stream:
            copied = record_event(self._device)
            groups = self._groups
            self._groups = {}
        copied.synchronize()
        del groups  # only now: copies have been writing the targets

    def copy(self, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        """Request a copy of ``tensor`` in the memory of ``device``, and count it.

        It may be read after ``wait_on_stream``.
        """
        if self._stream is None or not _is_copied_ahead(tensor):
            return super().copy(tensor, device, phase)
        self.count(tensor, phase)
        target = torch.empty_like(tensor, device=device)
        self._requested.append((tensor, target))
        return target

    def is_direct(self, tensor: Tensor) -> bool:
        """Whether the host takes no part in a copy of ``tensor``: the device copies it
        from where it is.
        """
        if self._stream is None or not _is_copied_ahead(tensor):
            return False
        return _needs_no_staging(tensor, torch.empty_like(tensor, device="meta"))

    def hold(self) -> None:
        """Let the next group not wait for what the computing stream gets from now on.

        All its copies are requested, so their targets are allocated.
        """
        if self._stream is not None and self._requested:
            computing = torch.accelerator.current_stream(self._device)
            self._after = computing.record_event()

    def issue(self, number: int) -> None:
        """Issue the copies requested since the last call, as group ``number``."""
        if self._stream is None or not self._requested:
            return
        requested = self._requested
        self._requested = []
        after = self._after
        self._after = None
        with self._lock, contextlib.ExitStack() as current:
            # Work that was launched there may still read the memory of the targets.
            if after is None:
                computing = torch.accelerator.current_stream(self._device)
                self._stream.wait_stream(computing)
            else:
                self._stream.wait_event(after)
            for stream in (*self._senders.values(), self._stream):
                current.enter_context(stream)
            is_staged = False
            for tensor, target in requested:
                source = self._in_pinned_memory(tensor, target)
                write(target, source, non_blocking=True)
                is_staged = is_staged or source is not tensor
                sender = self._senders.get(tensor.device)
                if sender is not None:  # its owner may free it before it is read
                    tensor.record_stream(sender)
            copied = self._stream.record_event()
            self._groups[number] = copied, [target for _, target in requested]
            if is_staged:
                self._pinned.append(record_event(self._device))

    def _in_pinned_memory(self, tensor: Tensor, target: Tensor) -> Tensor:
        """``tensor``, or a copy in pinned memory, which torch reuses only after it was
        read.
        """
        if _needs_no_staging(tensor, target):
            return tensor
        if len(self._pinned) == _MAX_PINNED:
            self._pinned[0].synchronize()
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def wait_on_stream(self, number: int) -> None:
        """Make the current stream wait for copy group ``number``."""
        # Another thread may synchronize, and so drop all groups, at the same time.
        group = self._groups.pop(number, None)
        if group is not None:
            copied, _ = group
            torch.accelerator.current_stream(self._device).wait_event(copied)


def _is_copied_ahead(tensor: Tensor) -> bool:
    """Whether a copy may be issued later: of a dense tensor of torch's own class."""
    return type(tensor) is Tensor and tensor.layout == torch.strided


def _needs_no_staging(tensor: Tensor, target: Tensor) -> bool:
    """Whether a device copies ``tensor`` to ``target``, its copy, from where it is."""
    # With other strides torch would first copy the tensor to pageable memory.
    is_pinned = tensor.is_pinned() and tensor.stride() == target.stride()
    return tensor.device.type != "cpu" or is_pinned
