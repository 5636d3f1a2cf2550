"""Who takes a step in this process: the engine, a plain loop, ``nn.DataParallel``.

Each takes the same sub-steps over the same rows, from no gradients to all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.card.networks import Network
from scatterpar import ScatterOnceParallel
from scatterpar.devices.runtime import physical

ACCUM = 16  # sub-steps of a replica
FULL, TINY = "full", "tiny"


@dataclass(frozen=True)
class Work:
    """A batch on the host, and the rows of a sub-step."""

    inputs: Tensor
    targets: Tensor | None
    rows: int

    def part(self, number: int, parts: int) -> Work:
        """One of several equal parts."""
        inputs, targets = (
            None if tensor is None else tensor.chunk(parts)[number]
            for tensor in (self.inputs, self.targets)
        )
        assert inputs is not None
        return Work(inputs, targets, self.rows)

    def pinned(self) -> Work:
        """In memory that cards can copy from while the host goes on."""
        targets = None if self.targets is None else self.targets.pin_memory()
        return Work(self.inputs.pin_memory(), targets, self.rows)


Works = dict[str, Work]  # by FULL and TINY


def works_of(network: Network, devices: Sequence[torch.device], first: int = 0) -> Works:
    """The batch of these replicas: as it should be, and one that computes next to nothing.

    Args:
        network: what for.
        devices: of the replicas.
        first: the number of the first one; the rows of a replica are its own.
    """
    replicas = range(first, first + len(devices))
    # Normalisation needs more than one value of each channel.
    sizes = {FULL: (network.data, network.rows), TINY: (network.tiny, 2)}
    found = {}
    for size, (data, rows) in sizes.items():
        parts = [data(rows * ACCUM, replica) for replica in replicas]
        inputs = torch.cat([part for part, _ in parts])
        targets = None if parts[0][1] is None else torch.cat([part for _, part in parts])
        work = Work(inputs, targets, rows)
        found[size] = work if devices[0].type == "cpu" else work.pinned()
    return found


_Made = Callable[[], tuple[nn.Module, Callable[[Work], object]]]


class Contender:
    """One that runs in this process.

    Args:
        make: gives the module that gets the gradients, and what takes a step.
        devices: where.
        works: the batches.

    Attributes:
        peaks: the most bytes of its own that each card has held.
    """

    def __init__(self, make: _Made, devices: Sequence[torch.device], works: Works) -> None:
        self._works = works
        self._cards = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
        self._before = _live(self._cards)
        self.module, self._run = make()
        self._own = dict.fromkeys(self._cards, 0)
        self.peaks: dict[str, int] = {}

    def gradient(self) -> list[Tensor]:
        """The gradient with normalisation and dropout at rest: the same for all, but for rounding.

        It is the first step, after which the contender holds what it will hold between steps.
        """
        self.module.eval()
        self._run(self._works[FULL])
        self.module.train()
        gradients = [p.grad for p in self.module.parameters()]
        found = [g.float().cpu() for g in gradients if g is not None]
        del gradients
        self.module.zero_grad()
        self._own = {card: live - self._before[card] for card, live in _live(self._cards).items()}
        return found

    def apart(self, expected: Path) -> float:
        """How far its gradient is from the one in a file, relative to that one's norm."""
        wanted: list[Tensor] = torch.load(expected)
        off = sum(
            float((mine - other).norm()) ** 2
            for mine, other in zip(self.gradient(), wanted, strict=True)
        )
        return (off / sum(float(other.norm()) ** 2 for other in wanted)) ** 0.5

    def step(self, size: str) -> float:
        """The seconds of a step; the memory that it took is noted."""
        before = _live(self._cards)
        for card in self._cards:
            torch.accelerator.reset_peak_memory_stats(card.index)
        seconds = timed(lambda: self._run(self._works[size]), self._cards)
        for card in self._cards:
            most = torch.accelerator.max_memory_allocated(card.index) - before[card]
            peak = most + self._own[card]
            self.peaks[str(card)] = max(peak, self.peaks.get(str(card), 0))
        self.module.zero_grad()
        return seconds


def engine(
    network: Network, devices: Sequence[torch.device], works: Works, accum: int = ACCUM
) -> Contender:
    """ScatterOnceParallel."""

    def make() -> tuple[nn.Module, Callable[[Work], object]]:
        module = network.module(devices[0])
        parallel = ScatterOnceParallel(module, accum, devices)
        return module, lambda work: parallel.forward_backward(
            work.inputs, work.targets, network.criterion
        )

    return Contender(make, devices, works)


def loop(network: Network, device: torch.device, works: Works) -> Contender:
    """What one writes by hand, on one device."""

    def make() -> tuple[nn.Module, Callable[[Work], object]]:
        module = network.module(device)
        return module, lambda work: accumulate(network, module, work, device)

    return Contender(make, [device], works)


def data_parallel(network: Network, devices: Sequence[torch.device], works: Works) -> Contender:
    """``nn.DataParallel``, called for each round of sub-steps."""

    def make() -> tuple[nn.Module, Callable[[Work], object]]:
        module = network.module(devices[0])
        parallel = nn.DataParallel(module, [device.index for device in devices])
        return module, lambda work: accumulate(
            network, parallel, replace(work, rows=len(devices) * work.rows), devices[0]
        )

    return Contender(make, devices, works)


def accumulate(
    network: Network,
    module: Callable[[Tensor], Any],
    work: Work,
    device: torch.device,
    around: Callable[[bool], contextlib.AbstractContextManager[object]] | None = None,
) -> None:
    """Gradient accumulation as one writes it by hand.

    Args:
        network: whose loss.
        module: what is called with each piece.
        work: the batch.
        device: where pieces go.
        around: the context of a sub-step, given whether it is the last one.
    """
    there = physical(device)
    pieces = work.inputs.split(work.rows)
    wanted = [None] * len(pieces) if work.targets is None else work.targets.split(work.rows)
    for number, (piece, labels) in enumerate(zip(pieces, wanted, strict=True), start=1):
        with around(number == len(pieces)) if around else contextlib.nullcontext():
            if labels is not None:
                labels = labels.to(there, non_blocking=True)
            loss = network.loss(module(piece.to(there, non_blocking=True)), labels)
            (loss / len(pieces)).backward()


def timed(run: Callable[[], object], cards: Sequence[torch.device]) -> float:
    """The seconds until the cards have done what they were given."""
    settle(cards)
    start = time.perf_counter()
    run()
    settle(cards)
    return time.perf_counter() - start


def settle(cards: Sequence[torch.device]) -> None:
    """Wait for these cards."""
    for card in cards:
        torch.accelerator.synchronize(card)


def _live(cards: Sequence[torch.device]) -> dict[torch.device, int]:
    return {card: torch.accelerator.memory_allocated(card.index) for card in cards}
