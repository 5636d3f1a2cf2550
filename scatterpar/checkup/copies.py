"""Copies between every two memories: whether every byte arrives, and how
fast they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor

from scatterpar.devices.copies import VIA_HOST
from scatterpar.devices.links import check_links
from scatterpar.devices.streams import has_streams
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import physical

PAGEABLE = "host"
PINNED = "pinned host"
SIZES = (1000, 2**20, 2**25)  # bytes; the first is no multiple of a cache line
# Bytes, between two accelerators: the engine's largest copies, and more.
LARGE = (2**26, 2**28)
_TRIES = 3
_INITIAL = 0x5A  # every byte of a target before the copy
_SHORTEST = 1e-9  # seconds, where the clock has not moved

_LINKS = (
    "Copies between two GPUs bypass the host, and something changes them: switch the "
    "IOMMU off (kernel option iommu=off or iommu=pt) and PCIe ACS (in the BIOS), and "
    "update the driver. Until then set NCCL_P2P_DISABLE=1 for NCCL. The engine copies "
    "through the host if it must."
)
_MEMORY = (
    "The memory, the slot or the driver is at fault, and nothing that is computed on "
    "this machine can be trusted: test the memory, change the GPU's slot or cable, "
    "update the driver."
)

Endpoint = torch.device | str  # a device, PAGEABLE or PINNED


@dataclass(frozen=True)
class DoctorVerdict:
    """One conclusion: ``fine``, ``note``, ``slow`` or ``WRONG``, with the reason and
    the remedy.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        if self.kind in ("fine", "note"):
            return f"{self.kind}: {self.text}"
        return f"{self.kind} because: {self.text}"


@dataclass(frozen=True)
class RouteResult:
    """Copies between two memories: altered bytes by size, and the speed of the largest
    size.
    """

    source: str
    target: str
    altered: dict[int, int]
    gigabytes_per_second: float
    error: str | None = None

    @property
    def fault(self) -> str:
        """The fault of a copy in words; empty if every byte arrived."""
        if self.error:
            return f"failed: {self.error}"
        sizes = [f"{n} of {size}" for size, n in self.altered.items() if n]
        return f"{', '.join(sizes)} bytes were altered" if sizes else ""

    def __str__(self) -> str:
        result = f"WRONG: {self.fault}" if self.fault else "whole"
        speed = self.gigabytes_per_second
        return f"{self.source:>12} to {self.target:12} {speed:7.2f} GB/s  {result}"


def on_copies(results: Sequence[RouteResult]) -> Iterator[DoctorVerdict]:
    """Conclude whether every byte arrived."""
    broken = [result for result in results if result.fault]
    # Peer access is between GPUs alone. A fault on the way to the host is elsewhere.
    involves_host = any("host" in route.source + route.target for route in broken)
    remedy = _MEMORY if involves_host else _LINKS
    for route in broken:
        way = f"from {route.source} to {route.target}"
        if route.error:
            text = f"a copy {way} {route.fault}"
        else:
            text = (
                f"copies {way} bring other bytes than were sent: {route.fault}. "
                f"{remedy}"
            )
        yield DoctorVerdict("WRONG", text)
    if broken:  # the other ways are fine, which helps nobody
        return
    if results:
        number = len(results)
        text = f"copies arrive as they were sent, on all {number} ways."
        yield DoctorVerdict("fine", text)
    else:
        yield DoctorVerdict("fine", "there is one memory: nothing is copied.")


def routes(devices: Sequence[torch.device]) -> list[tuple[Endpoint, Endpoint]]:
    """Every pair of a device and the host, pageable or pinned, and of two devices, both
    ways.
    """
    host = torch.device("cpu")
    memories = [device for device in dict.fromkeys(devices) if device != host]
    # Pinning is for the DMA of accelerators; a virtual device is host memory itself.
    accelerators = [device for device in memories if device.type != "cpu"]
    to_devices: list[tuple[Endpoint, Endpoint]] = []
    to_devices += product([PAGEABLE], memories)
    to_devices += product([PINNED], accelerators)
    # Both ways: an IOMMU may change the bytes of one of them.
    to_host = [(target, source) for source, target in to_devices]
    return [*to_devices, *to_host, *permutations(memories, 2)]


def examine(devices: Sequence[torch.device]) -> Iterator[RouteResult]:
    """Test every route between these memories, one after the other."""
    VIA_HOST.clear()  # the direct routes are tested
    check_links.cache_clear()  # the next step of an engine checks its own routes again
    senders = [device for device in dict.fromkeys(devices) if has_streams(device)]
    # One block for all sizes: to draw 256 MB again for each route would take longer
    # than the copies.
    content = _Content(LARGE[-1] if len(senders) > 1 else SIZES[-1])
    for source, target in routes(devices):
        sizes: Sequence[int] = SIZES
        if source in senders and target in senders:
            sizes = SIZES + LARGE
        yield _result(content, source, target, sizes)


class _Content:
    """The bytes that are sent, with one copy per memory."""

    def __init__(self, size: int) -> None:
        # Its own generator: the caller's stays as it is.
        generator = torch.Generator()
        self._bytes = torch.randint(
            256, (size,), dtype=torch.uint8, generator=generator
        )
        self._copies: dict[Endpoint, Tensor] = {}

    def at(self, place: Endpoint, size: int, number: int) -> Tensor:
        """``size`` bytes in the memory of ``place``; other ones for each ``number``."""
        if place not in self._copies:
            self._copies[place] = _at(place, self._bytes)
        return self._copies[place][:size] ^ number


def _result(
    content: _Content, source: Endpoint, target: Endpoint, sizes: Sequence[int]
) -> RouteResult:
    """Copy each size a few times. The largest number of altered bytes and the best time
    count.
    """
    altered: dict[int, int] = {}
    speed = 0.0
    failure = None
    try:
        for size in sizes:
            altered[size] = 0
            fastest = float("inf")
            # Each try sends other bytes. A copy that does nothing would pass otherwise.
            for number in range(1, 1 + _TRIES):
                sent = content.at(source, size, number)
                arrived, seconds = carry(sent, source, target)
                expected = content.at(target, size, number)
                altered[size] = max(altered[size], int((arrived != expected).sum()))
                fastest = min(fastest, seconds)
            speed = size / fastest / 1e9
    except Exception as error:  # of any backend: the next route is tested, too
        failure = f"{type(error).__name__}: {error}"
    return RouteResult(str(source), str(target), altered, speed, failure)


def carry(tensor: Tensor, source: Endpoint, target: Endpoint) -> tuple[Tensor, float]:
    """``tensor``, copied from ``source`` to ``target`` by ``copy_into``, and the
    seconds.
    """
    original = _at(source, tensor)
    # A pattern, so that bytes that never arrived are seen.
    arrived = _at(target, torch.full_like(original, _INITIAL))
    synchronize_all([source, target])
    start = time.perf_counter()
    Transfers().copy_into(arrived, original, "scatter")
    synchronize_all([source, target])
    seconds = time.perf_counter() - start
    return arrived, max(seconds, _SHORTEST)


def _at(place: Endpoint, tensor: Tensor) -> Tensor:
    """``tensor`` in the memory of ``place``."""
    if isinstance(place, torch.device):
        return tensor.to(physical(place))
    on_host = tensor.cpu()
    return on_host.pin_memory() if place == PINNED else on_host


def synchronize_all(devices: Sequence[Endpoint]) -> None:
    """Wait until all work queued on these devices is done."""
    for device in devices:
        if isinstance(device, torch.device) and device.type != "cpu":
            torch.accelerator.synchronize(device)
