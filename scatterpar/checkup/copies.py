"""Copies between every two memories: whether they bring every byte, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import pattern
from scatterpar.devices.ledger import DETOURS, Ledger
from scatterpar.devices.verbs import physical

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
        speed = f"{self.gigabytes_per_second:.2f} GB/s"
        return f"{way} {speed:>12}  {'WRONG: ' if wrong else 'whole'}{', '.join(wrong)}"


def routes(devices: Sequence[torch.device]) -> list[tuple[Place, Place]]:
    """The host with each device, both ways, pinned and not, and every ordered pair of devices."""
    memories = [device for device in dict.fromkeys(devices) if device != torch.device("cpu")]
    found: list[tuple[Place, Place]] = []
    for device in memories:
        kinds = (HOST,) if device.type == "cpu" else (HOST, PINNED)  # pinned is for accelerators
        found += [way for kind in kinds for way in ((kind, device), (device, kind))]
    return [*found, *permutations(memories, 2)]


def examine(devices: Sequence[torch.device]) -> Iterator[Route]:
    """Every route between these memories, one after the other."""
    DETOURS.clear()  # the direct ways are examined; the next engine looks for itself
    # Another one for each try, or what an earlier copy left would look right.
    samples = {size: [pattern(size) ^ (i + 1) for i in range(_TRIES)] for size in SIZES}
    for source, target in routes(devices):
        altered: dict[int, int] = {}
        speed, failed = 0.0, None
        try:
            for size in SIZES:
                tries = [_tried(sent, source, target) for sent in samples[size]]
                altered[size] = max(wrong for wrong, _ in tries)
                speed = size / min(seconds for _, seconds in tries) / 1e9
        except Exception as error:
            speed, failed = 0.0, f"{type(error).__name__}: {error}"
        yield Route(str(source), str(target), altered, speed, failed)


def _tried(sent: Tensor, source: Place, target: Place) -> tuple[int, float]:
    """How many bytes of one copy are wrong, and the seconds that it took."""
    if source == PINNED:
        there = sent.pin_memory()
    else:
        there = sent if isinstance(source, str) else sent.to(physical(source))
    arrived, seconds = carry(there, source, target)
    return int((arrived.cpu() != sent).sum()), seconds


def carry(tensor: Tensor, source: Place, target: Place) -> tuple[Tensor, float]:
    """A copy at ``target`` of ``tensor``, by the engine's own verbs, and its seconds."""
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True) if target == PINNED else None
    settle([source, target])
    start = time.perf_counter()
    if pinned is None:
        device = torch.device("cpu") if isinstance(target, str) else target
        arrived = Ledger().copy(tensor, device, "scatter")
    else:
        arrived = pinned
        Ledger().copy_into(pinned, tensor, "scatter")
    settle([source, target])
    return arrived, max(time.perf_counter() - start, 1e-9)


def settle(devices: Sequence[Place]) -> None:
    """Wait until these devices have done what they were given."""
    for device in devices:
        if isinstance(device, torch.device) and device.type != "cpu":
            torch.accelerator.synchronize(device)
