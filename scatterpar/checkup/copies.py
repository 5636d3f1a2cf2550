"""Copies between every two memories: whether every byte arrives, and how
fast they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations, product

import torch
from torch import Tensor

from scatterpar.devices.device_ids import physical
from scatterpar.devices.links import check_links
from scatterpar.devices.streams import has_streams
from scatterpar.devices.transfers import VIA_HOST, Prefetcher, Transfers

PAGEABLE, PINNED = "host", "pinned host"
EACH, OTHERS = "each device", "all others"  # all pairs at once, in both directions
SIZES = (1000, 2**20, 2**25)  # bytes; the first is no multiple of a cache line
# bytes, between two accelerators: the engine's largest copies, and more
LARGE = (2**26, 2**28)
_TRIES = 3
_INITIAL = 0x5A  # every byte of a target before the copy

_LINKS = (
    "Copies between two GPUs bypass the host, and something changes them: switch the "
    "IOMMU off "
    "(kernel option iommu=off or iommu=pt) and PCIe ACS (in the BIOS), and update the "
    "driver. "
    "Until then set NCCL_P2P_DISABLE=1 for NCCL. The engine copies through the host "
    "if it must."
)
_MEMORY = (
    "The memory, the slot or the driver is at fault, and nothing that is computed on "
    "this machine "
    "can be trusted: test the memory, change the GPU's slot or cable, update the "
    "driver."
)

Place = torch.device | str  # a device, PAGEABLE or PINNED
# arrived and expected tensors, and the seconds
Copies = tuple[list[tuple[Tensor, Tensor]], float]


@dataclass(frozen=True)
class Verdict:
    """One conclusion: ``fine``, ``note``, ``slow`` or ``WRONG``, with the reason and
    the remedy.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return (
            f"{self.kind}{'' if self.kind in ('fine', 'note') else ' because'}: "
            f"{self.text}"
        )


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
        """What went wrong; empty if every byte arrived."""
        wrong = ", ".join(f"{n} of {size}" for size, n in self.altered.items() if n)
        return (
            f"failed: {self.error}"
            if self.error
            else wrong and f"{wrong} bytes were altered"
        )

    def __str__(self) -> str:
        result = f"WRONG: {self.fault}" if self.fault else "whole"
        speed = self.gigabytes_per_second
        return f"{self.source:>12} to {self.target:12} {speed:7.2f} GB/s  {result}"


def on_copies(found: Sequence[RouteResult]) -> Iterator[Verdict]:
    """Conclude whether every byte arrived."""
    broken = [route for route in found if route.fault]
    remedy = (
        _MEMORY
        if any("host" in route.source + route.target for route in broken)
        else _LINKS
    )
    for route in broken:
        way = f"from {route.source} to {route.target}"
        altered = (
            f"copies {way} bring other bytes than were sent: {route.fault}. {remedy}"
        )
        yield Verdict(
            "WRONG", f"a copy {way} {route.fault}" if route.error else altered
        )
    if not broken:
        all_right = f"copies arrive as they were sent, on all {len(found)} ways."
        yield Verdict(
            "fine", all_right if found else "there is one memory: nothing is copied."
        )


def routes(devices: Sequence[torch.device]) -> list[tuple[Place, Place]]:
    """Every pair of a device and the host, pageable or pinned, and of two devices, both
    ways.
    """
    memories = [
        device for device in dict.fromkeys(devices) if device != torch.device("cpu")
    ]
    gpus = [device for device in memories if device.type != "cpu"]
    ways = [*product([PAGEABLE], memories), *product([PINNED], gpus)]
    return [
        *ways,
        *((device, host) for host, device in ways),
        *permutations(memories, 2),
    ]


def examine(devices: Sequence[torch.device]) -> Iterator[RouteResult]:
    """Test every route between these memories, one after the other, then all pairs at
    once.
    """
    VIA_HOST.clear()  # the direct routes are tested
    check_links.cache_clear()  # the next step of an engine checks its own routes again
    senders = [device for device in dict.fromkeys(devices) if has_streams(device)]
    size = LARGE[-1] if len(senders) > 1 else SIZES[-1]
    largest = torch.randint(
        256, (size,), dtype=torch.uint8, generator=torch.Generator()
    )
    known = cache(lambda place: _at(place, largest))  # one copy per memory

    def one(source: Place, target: Place, size: int, number: int) -> Copies:
        arrived, seconds = carry(known(source)[:size] ^ number, source, target)
        return [(arrived, known(target)[:size] ^ number)], seconds

    def all_at_once(size: int, number: int) -> Copies:
        """On the streams that copy rows."""
        sent = {device: known(device)[:size] ^ number for device in senders}
        synchronize(senders)
        start = time.perf_counter()
        transfers = {device: Prefetcher(device, sent) for device in sent}
        arrived = [
            (transfers[target].copy(sent[source], target, "scatter"), sent[target])
            for source, target in permutations(senders, 2)
        ]
        for each in transfers.values():
            each.issue(0)
        for each in transfers.values():
            each.synchronize()
        return arrived, time.perf_counter() - start

    for pair in routes(devices):
        sizes = (*SIZES, *LARGE) if {*pair} <= {*senders} else SIZES
        yield _result(*pair, sizes, partial(one, *pair))
    if len(senders) > 1:
        yield _result(EACH, OTHERS, LARGE, all_at_once)


def _result(
    source: Place,
    target: Place,
    sizes: Sequence[int],
    copies_of: Callable[[int, int], Copies],
) -> RouteResult:
    """Copy each size a few times. The largest number of altered bytes and the best time
    count.
    """
    altered, speed, failed = {}, 0.0, None
    try:
        for size in sizes:
            altered[size], fastest = 0, float("inf")
            for number in range(1, 1 + _TRIES):
                # Each try sends other bytes. A copy that does nothing would pass
                # otherwise.
                pairs, seconds = copies_of(size, number)
                altered[size] = max(
                    altered[size], *(int((a != b).sum()) for a, b in pairs)
                )
                fastest = min(fastest, seconds)
                speed = size * len(pairs) / fastest / 1e9
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    return RouteResult(str(source), str(target), altered, speed, failed)


def carry(tensor: Tensor, source: Place, target: Place) -> tuple[Tensor, float]:
    """``tensor``, copied from ``source`` to ``target`` by ``copy_into``, and the
    seconds.
    """
    original = _at(source, tensor)
    arrived = _at(target, torch.full_like(original, _INITIAL))
    synchronize([source, target])
    start = time.perf_counter()
    Transfers().copy_into(arrived, original, "scatter")
    synchronize([source, target])
    return arrived, max(time.perf_counter() - start, 1e-9)


def _at(place: Place, tensor: Tensor) -> Tensor:
    tensor = tensor.to(physical(place) if isinstance(place, torch.device) else "cpu")
    return tensor.pin_memory() if place == PINNED else tensor


def synchronize(devices: Sequence[Place]) -> None:
    """Wait until all work queued on these devices is done."""
    for device in devices:
        if isinstance(device, torch.device) and device.type != "cpu":
            torch.accelerator.synchronize(device)
