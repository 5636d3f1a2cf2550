"""What does training with AdamW take on each card, with a sharded optimizer and without?

``python -m benchmarks.many_cards.sharded gpt2 4`` (see ``process.py``) prints, of the
last step of each optimizer, the peaks of both halves, and the bytes through each card::

    optimizer.zero_grad()
    engine.forward_backward(rows)     peak "backward"
    optimizer.step()                  peak "step"
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from simulated import NAME
from torch.optim import AdamW, Optimizer

from benchmarks.many_cards import process
from benchmarks.many_cards.count import MODELS, Bare
from scatterpar import ScatterOnceParallel, ShardedOptimizer
from scatterpar.devices.transfers import Transfers

_STEPS = 3  # the first one makes the optimizer's state


def count(name: str, devices: int) -> dict[str, Any]:
    """Counts of a step with each optimizer."""
    return {
        "AdamW": _counted(name, devices, _plain),
        "sharded": _counted(name, devices, _sharded),
    }


def _plain(engine: ScatterOnceParallel) -> Optimizer:
    return AdamW(engine.module.parameters())


def _sharded(engine: ScatterOnceParallel) -> Optimizer:
    return ShardedOptimizer(engine, AdamW)


def _counted(
    name: str, devices: int, make: Callable[[ScatterOnceParallel], Optimizer]
) -> dict[str, Any]:
    """Peaks of the last step, bytes between steps, and bytes through each card."""
    build, dtype = MODELS[name]
    model = Bare(build().to(dtype)).to(f"{NAME}:0")
    rows = torch.ones(devices, 1, dtype=dtype)
    size = sum(parameter.nbytes for parameter in model.parameters())
    counts: dict[str, Any] = {"parameters": size}
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        optimizer = make(engine)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            with _crossing() as crossed:
                process.reset_peaks(devices)
                engine.forward_backward(rows)
                counts["backward"] = process.peaks(devices)
                process.reset_peaks(devices)
                optimizer.step()
                counts["step"] = process.peaks(devices)
        cards = range(devices)
        counts["held"] = [torch.accelerator.memory_allocated(card) for card in cards]
    counts["crossed"] = [crossed[card] for card in cards]
    return counts


@contextmanager
def _crossing() -> Iterator[Counter[int]]:
    """Yields the bytes that leave or reach each card, without those of the host."""
    crossed: Counter[int] = Counter()
    copy = Transfers.copy
    copy_into = Transfers.copy_into

    def note(source: torch.Tensor, target: torch.device) -> None:
        is_between_cards = source.device.type == target.type == NAME
        if is_between_cards and source.device != target:
            crossed[source.device.index] += source.nbytes
            crossed[target.index] += source.nbytes

    def noting_copy(
        self: Transfers, tensor: torch.Tensor, device: torch.device, phase: str
    ) -> Any:
        note(tensor, device)
        return copy(self, tensor, device, phase)

    def noting_copy_into(
        self: Transfers, target: torch.Tensor, source: torch.Tensor, phase: str
    ) -> None:
        note(source, target.device)
        copy_into(self, target, source, phase)

    with mock.patch.multiple(Transfers, copy=noting_copy, copy_into=noting_copy_into):
        yield crossed


if __name__ == "__main__":
    process.main(count)
