"""What one step moves between memories and how long it takes, counted where it happens."""

from __future__ import annotations

import time
from typing import Self

import torch
from torch import Tensor

from scatterpar.devices.verbs import mark, physical, reads_late

PHASES = ("scatter", "replicate", "compute", "reduce")

# From which device to which copies go through the host's memory: see ``check_links``.
DETOURS: set[tuple[torch.device, torch.device]] = set()

Span = tuple[float, float]  # start and end, in seconds of time.perf_counter()


class Ledger:
    """Copies between memories, and counts what it copied, by phase.

    Every byte that crosses from one memory to another goes through ``copy`` or
    ``copy_into``; the counts are those of the tensors that were copied.

    As a context manager it ends only when everything on the host that was copied may be
    written again: a copy from pinned memory reads it some time after it was asked for.
    """

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(PHASES, 0)
        self.messages = dict.fromkeys(PHASES, 0)
        self._under_way: dict[torch.device, torch.Event] = {}
        self._followed: list[Ledger] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.settle()
        except Exception:
            if error is None:  # else the first error is the one to tell
                raise

    def settle(self) -> None:
        """Wait until nothing that was copied is read any more."""
        while self._under_way:
            _, event = self._under_way.popitem()
            event.synchronize()
        while self._followed:
            other = self._followed.pop()
            other.settle()
            for phase in PHASES:
                self.bytes[phase] += other.bytes[phase]
                self.messages[phase] += other.messages[phase]

    def follow(self, other: Ledger) -> None:
        """Count, once both are settled, what ``other`` has copied too: it is another thread's."""
        self._followed.append(other)

    def copy(self, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        """A copy of ``tensor`` in the memory of ``device``, memory format kept."""
        self.count(tensor, phase)
        is_late = device.type != "cpu"
        tensor = passable(tensor, device) if DETOURS else tensor
        copied = tensor.to(physical(device), copy=True, non_blocking=is_late)
        if is_late and reads_late(tensor, device):
            self._under_way[device] = mark(device)
        return copied

    def copy_into(self, target: Tensor, source: Tensor, phase: str) -> None:
        """Copy ``source`` into ``target``, a tensor of the same size in another memory."""
        self.count(source, phase)
        source = passable(source, target.device)
        target.copy_(source, non_blocking=target.device.type != "cpu")

    def count(self, tensor: Tensor, phase: str) -> None:
        """Count one copy of ``tensor``."""
        parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
        for part in parts:
            self.bytes[phase] += part.numel() * part.element_size()
            self.messages[phase] += 1


def passable(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, or a copy of it on the host where the direct way to ``device`` is broken."""
    return tensor.cpu() if (tensor.device, device) in DETOURS else tensor


class Clock:
    """Wall time by phase, and when each replica was at work.

    Attributes:
        seconds: by phase.
        passes: for each time that the replicas ran: when each of them started and ended.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.passes: list[dict[int, Span]] = []

    def phase(self, name: str) -> _Phase:
        """Time the body as part of phase ``name``."""
        return _Phase(self.seconds, name)


class _Phase:
    """Adds the time that its body takes to ``seconds[name]``."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start
