"""Copies between every two memories: whether they bring every byte, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import pattern
from scatterpar.devices.runtime import has_streams, physical
from scatterpar.devices.transfers import HOST_STAGED, Prefetcher, Transfers

HOST, PINNED = "host", "pinned host"
EACH, OTHERS = "each device", "all others"  # all pairs at once, in both directions
SIZES = (1000, 2**20, 2**25)  # bytes; the first is no multiple of a cache line
LARGE = (2**26, 2**28)  # likewise, between two accelerators: as large as the engine's, and larger
_PERIOD = 1_000_003  # bytes after which a pattern repeats itself
_TRIES, _BEFORE = 3, 0x5A  # what memory holds before a copy

Place = torch.device | str  # a device, HOST or PINNED


@dataclass(frozen=True)
class Route:
    """Copies from one memory to another.

    ``altered`` has, by the size of the copy, how many bytes arrived other than they were sent. The
    speed is that of the largest copy.
    """

    source: str
    target: str
    altered: dict[int, int]
    gigabytes_per_second: float
    error: str | None = None

    @property
    def arrives(self) -> bool:
        """Whether every byte arrived."""
        return self.error is None and not any(self.altered.values())

    def __str__(self) -> str:
        way = f"{self.source:>12} to {self.target:12}"
        if self.error is not None:
            return f"{way} failed: {self.error}"
        wrong = [f"{n} of {size} bytes altered" for size, n in self.altered.items() if n]
        result = f"WRONG: {', '.join(wrong)}" if wrong else "whole"
        return f"{way} {self.gigabytes_per_second:7.2f} GB/s  {result}"


def routes(devices: Sequence[torch.device]) -> list[tuple[Place, Place]]:
    """The host with each device, both ways, pinned and not, and every ordered pair of devices."""
    memories = _memories(devices)
    found: list[tuple[Place, Place]] = []
    for device in memories:
        for host in (HOST,) if device.type == "cpu" else (HOST, PINNED):
            found += [(host, device), (device, host)]
    return [*found, *permutations(memories, 2)]


def examine(devices: Sequence[torch.device]) -> Iterator[Route]:
    """Every route between these memories, one after the other, and then all pairs at once."""
    HOST_STAGED.clear()  # the direct ways are examined; the next engine checks them itself
    for way in routes(devices):
        source, target = way
        altered, speed, failed = {}, 0.0, None
        is_peer = all(isinstance(place, torch.device) and has_streams(place) for place in way)
        try:
            for size in (*SIZES, *LARGE) if is_peer else SIZES:
                altered[size], seconds = _try(size, source, target)
                speed = size / seconds / 1e9
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        yield Route(str(source), str(target), altered, speed, failed)
    if len(senders := [device for device in _memories(devices) if has_streams(device)]) > 1:
        yield _all_at_once(senders)


def _memories(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device != torch.device("cpu")]


def _try(size: int, source: Place, target: Place) -> tuple[int, float]:
    """The most bytes of a copy that were altered, in some tries, and the least seconds."""
    sent, expected = _at(source, _bytes(size)), _at(target, _bytes(size))
    altered, fastest = 0, float("inf")
    for number in range(1, 1 + _TRIES):  # other bytes each time, or the last ones would look right
        arrived, seconds = carry(sent ^ number, source, target)
        altered = max(altered, _difference(arrived, expected ^ number))
        fastest = min(fastest, seconds)
    return altered, fastest


def carry(tensor: Tensor, source: Place, target: Place) -> tuple[Tensor, float]:
    """``tensor``, copied from ``source`` to ``target`` by the engine's verb, and the seconds."""
    there = _at(source, tensor)
    arrived = _at(target, torch.full_like(there, _BEFORE))
    settle([source, target])
    start = time.perf_counter()
    Transfers().copy_into(arrived, there, "scatter")
    settle([source, target])
    return arrived, max(time.perf_counter() - start, 1e-9)


def _all_at_once(devices: Sequence[torch.device]) -> Route:
    """Copies between all pairs of devices at once, on the streams on which rows are copied."""
    altered, speed, failed = {}, 0.0, None
    pairs = list(permutations(devices, 2))
    try:
        for size in LARGE:
            altered[size], fastest = 0, float("inf")
            known = {device: _at(device, _bytes(size)) for device in devices}
            for number in range(1, 1 + _TRIES):
                sent = {device: tensor ^ number for device, tensor in known.items()}
                arrived, seconds = _carry_all(sent, pairs)
                fastest = min(fastest, seconds)
                for (_, target), tensor in zip(pairs, arrived, strict=True):
                    altered[size] = max(altered[size], _difference(tensor, sent[target]))
            speed = size * len(pairs) / fastest / 1e9
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    return Route(EACH, OTHERS, altered, speed, failed)


def _carry_all(
    sent: dict[torch.device, Tensor], pairs: Sequence[tuple[torch.device, torch.device]]
) -> tuple[list[Tensor], float]:
    """The first device's tensor copied to the second, for each of the pairs, and the seconds."""
    settle(list(sent))
    start = time.perf_counter()
    transfers = {device: Prefetcher(device, sent) for device in sent}
    arrived = [transfers[target].copy(sent[source], target, "scatter") for source, target in pairs]
    for each in transfers.values():
        each.issue(0)
    for each in transfers.values():
        each.synchronize()
    return arrived, time.perf_counter() - start


def _difference(one: Tensor, other: Tensor) -> int:
    """How many bytes differ; it takes next to no memory if none do."""
    return 0 if torch.equal(one, other) else int((one != other).sum())


def _bytes(size: int) -> Tensor:
    """``size`` bytes on the host, without regularity up to the period."""
    known = pattern(min(size, _PERIOD))
    return known.repeat(-(-size // len(known)))[:size]


def _at(place: Place, tensor: Tensor) -> Tensor:
    if isinstance(place, torch.device):
        return tensor.to(physical(place))
    tensor = tensor.cpu()
    return tensor.pin_memory() if place == PINNED else tensor


def settle(devices: Sequence[Place]) -> None:
    """Wait until these devices have done what they were given."""
    for device in devices:
        if isinstance(device, torch.device) and device.type != "cpu":
            torch.accelerator.synchronize(device)
