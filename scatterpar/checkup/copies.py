"""Copies between every two memories: whether they bring every byte, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import pattern
from scatterpar.devices.runtime import physical
from scatterpar.devices.transfers import HOST_STAGED, Transfers

HOST, PINNED = "host", "pinned host"
SIZES = (1000, 2**20, 2**25)  # bytes; the first is no multiple of a cache line
_TRIES = 3

Place = torch.device | str  # a device, HOST or PINNED


@dataclass(frozen=True)
class Route:
    """Copies from one memory to another.

    ``altered`` tells how many bytes arrived other than they were sent, by the size of the copy;
    the speed is that of the largest one.
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
    memories = [device for device in dict.fromkeys(devices) if device != torch.device("cpu")]
    found: list[tuple[Place, Place]] = []
    for device in memories:
        for host in (HOST,) if device.type == "cpu" else (HOST, PINNED):
            found += [(host, device), (device, host)]
    return [*found, *permutations(memories, 2)]


def examine(devices: Sequence[torch.device]) -> Iterator[Route]:
    """Every route between these memories, one after the other."""
    HOST_STAGED.clear()  # the direct ways are examined; the next engine looks for itself
    for source, target in routes(devices):
        altered, speed, failed = dict.fromkeys(SIZES, 0), 0.0, None
        try:
            for size in SIZES:
                seconds = []
                for i in range(_TRIES):
                    sent = pattern(size) ^ (i + 1)  # others each time, or the last would look right
                    arrived, spent = carry(sent, source, target)
                    altered[size] = max(altered[size], int((arrived.cpu() != sent).sum()))
                    seconds.append(spent)
                speed = size / min(seconds) / 1e9
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        yield Route(str(source), str(target), altered, speed, failed)


def carry(tensor: Tensor, source: Place, target: Place) -> tuple[Tensor, float]:
    """``tensor``, copied from ``source`` to ``target`` by the engine's verb, and the seconds."""
    there, arrived = _at(source, tensor), _at(target, ~tensor)
    settle([source, target])
    start = time.perf_counter()
    Transfers().copy_into(arrived, there, "scatter")
    settle([source, target])
    return arrived, max(time.perf_counter() - start, 1e-9)


def _at(place: Place, tensor: Tensor) -> Tensor:
    if isinstance(place, torch.device):
        return tensor.to(physical(place))
    return tensor.pin_memory() if place == PINNED else tensor


def settle(devices: Sequence[Place]) -> None:
    """Wait until these devices have done what they were given."""
    for device in devices:
        if isinstance(device, torch.device) and device.type != "cpu":
            torch.accelerator.synchronize(device)
