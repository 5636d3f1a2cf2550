"""Copies between every two memories: whether every byte arrives, and how fast they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import check_links, pattern
from scatterpar.devices.runtime import has_streams, physical
from scatterpar.devices.transfers import VIA_HOST, Prefetcher, Transfers

PAGEABLE, PINNED = "host", "pinned host"
EACH, OTHERS = "each device", "all others"  # all pairs at once, in both directions
SIZES = (1000, 2**20, 2**25)  # bytes; the first is no multiple of a cache line
LARGE = (2**26, 2**28)  # bytes, between two accelerators: the engine's largest copies, and more
_PERIOD = 1_000_003  # bytes after which a pattern repeats
_TRIES = 3
_INITIAL = 0x5A  # every byte of a target before the copy

Place = torch.device | str  # a device, PAGEABLE or PINNED


@dataclass(frozen=True)
class RouteResult:
    """Copies from one memory to another.

    ``altered`` has the number of bytes that arrived altered, by the size of the copy. The speed is
    that of the largest copy.
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
    """Every pair of a device and the host, pageable or pinned, and of two devices, both ways."""
    memories = _memories(devices)
    pairs: list[tuple[Place, Place]] = []
    for device in memories:
        for host in (PAGEABLE,) if device.type == "cpu" else (PAGEABLE, PINNED):
            pairs += [(host, device), (device, host)]
    return [*pairs, *permutations(memories, 2)]


def examine(devices: Sequence[torch.device]) -> Iterator[RouteResult]:
    """Test every route between these memories, one after the other, then all pairs at once."""
    # The direct routes are tested. The next step of an engine checks its own again.
    VIA_HOST.clear()
    check_links.cache_clear()
    for pair in routes(devices):
        source, target = pair
        altered, speed, failed = {}, 0.0, None
        is_peer = all(isinstance(place, torch.device) and has_streams(place) for place in pair)
        try:
            for size in (*SIZES, *LARGE) if is_peer else SIZES:
                altered[size], seconds = _try(size, source, target)
                speed = size / seconds / 1e9
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        yield RouteResult(str(source), str(target), altered, speed, failed)
    if len(senders := [device for device in _memories(devices) if has_streams(device)]) > 1:
        yield _all_at_once(senders)


def _memories(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device != torch.device("cpu")]


def _try(size: int, source: Place, target: Place) -> tuple[int, float]:
    """The largest number of altered bytes in a few copies, and the seconds of the fastest copy."""
    sent, expected = _at(source, _bytes(size)), _at(target, _bytes(size))
    altered, fastest = 0, float("inf")
    for number in range(1, 1 + _TRIES):
        # Each try sends other bytes. A copy that does nothing would pass otherwise.
        arrived, seconds = carry(sent ^ number, source, target)
        altered = max(altered, _difference(arrived, expected ^ number))
        fastest = min(fastest, seconds)
    return altered, fastest


def carry(tensor: Tensor, source: Place, target: Place) -> tuple[Tensor, float]:
    """``tensor``, copied from ``source`` to ``target`` by ``copy_into``, and the seconds."""
    original = _at(source, tensor)
    arrived = _at(target, torch.full_like(original, _INITIAL))
    synchronize([source, target])
    start = time.perf_counter()
    Transfers().copy_into(arrived, original, "scatter")
    synchronize([source, target])
    return arrived, max(time.perf_counter() - start, 1e-9)


def _all_at_once(devices: Sequence[torch.device]) -> RouteResult:
    """Test copies between all pairs of devices at once, on the streams that copy rows."""
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
    return RouteResult(EACH, OTHERS, altered, speed, failed)


def _carry_all(
    sent: dict[torch.device, Tensor], pairs: Sequence[tuple[torch.device, torch.device]]
) -> tuple[list[Tensor], float]:
    """For each pair, the first device's tensor copied to the second; and the seconds for all."""
    synchronize(list(sent))
    start = time.perf_counter()
    transfers = {device: Prefetcher(device, sent) for device in sent}
    arrived = [transfers[target].copy(sent[source], target, "scatter") for source, target in pairs]
    for each in transfers.values():
        each.issue(0)
    for each in transfers.values():
        each.synchronize()
    return arrived, time.perf_counter() - start


def _difference(one: Tensor, other: Tensor) -> int:
    """The number of bytes that differ; needs hardly any memory if none do."""
    return 0 if torch.equal(one, other) else int((one != other).sum())


def _bytes(size: int) -> Tensor:
    """``size`` bytes on the host, irregular within the period."""
    period = pattern(min(size, _PERIOD))
    return period.repeat(-(-size // len(period)))[:size]


def _at(place: Place, tensor: Tensor) -> Tensor:
    if isinstance(place, torch.device):
        return tensor.to(physical(place))
    tensor = tensor.cpu()
    return tensor.pin_memory() if place == PINNED else tensor


def synchronize(devices: Sequence[Place]) -> None:
    """Wait until all work queued on these devices is done."""
    for device in devices:
        if isinstance(device, torch.device) and device.type != "cpu":
            torch.accelerator.synchronize(device)
