"""What training with AdamW takes on each device of the simulated accelerator, sharded
and not.

``SIMULATED_ACCELERATOR=…/accelerator.so python -m benchmarks.many_cards.sharded gpt2
4`` prints one line of JSON; ``tests`` must be importable.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from simulated import NAME, load_built
from torch.optim import AdamW, Optimizer

from benchmarks.many_cards.count import MODELS, Bare
from scatterpar import ScatterOnceParallel, ShardedOptimizer
from scatterpar.devices.transfers import Transfers

_STEPS = 3  # the state begins in the first


def count(name: str, devices: int) -> dict[str, Any]:
    """Of the last step, with each optimizer: peaks by card, and what went through each
    card.
    """
    plain = _counted(name, devices, lambda engine: AdamW(engine.module.parameters()))
    sharded = _counted(name, devices, lambda engine: ShardedOptimizer(engine, AdamW))
    return {"AdamW": plain, "sharded": sharded}


def _counted(
    name: str, devices: int, make: Callable[[ScatterOnceParallel], Optimizer]
) -> dict[str, Any]:
    build, dtype = MODELS[name]
    model = Bare(build().to(dtype)).to(f"{NAME}:0")
    rows = torch.ones(devices, 1, dtype=dtype)
    found: dict[str, Any] = {"parameters": sum(p.nbytes for p in model.parameters())}
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        optimizer = make(engine)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            with _crossing(devices) as crossed:
                found["backward"] = _peaks(
                    devices, lambda: engine.forward_backward(rows)
                )
                found["step"] = _peaks(devices, optimizer.step)
        found["held"] = [
            torch.accelerator.memory_allocated(index) for index in range(devices)
        ]
    return {**found, "crossed": [crossed[index] for index in range(devices)]}


def _peaks(devices: int, work: Callable[[], Any]) -> list[int]:
    for index in range(devices):
        torch.accelerator.synchronize(index)
        torch.accelerator.reset_peak_memory_stats(index)
    work()
    return [torch.accelerator.max_memory_allocated(index) for index in range(devices)]


@contextmanager
def _crossing(devices: int) -> Iterator[Counter[int]]:
    """Bytes that leave or reach each card, but for those from and to the host."""
    crossed: Counter[int] = Counter()
    copy, copy_into = Transfers.copy, Transfers.copy_into

    def noted(source: torch.Tensor, target: torch.device) -> None:
        if source.device.type == target.type == NAME and source.device != target:
            crossed[source.device.index] += source.nbytes
            crossed[target.index] += source.nbytes

    def copied(
        self: Transfers, tensor: torch.Tensor, device: torch.device, phase: str
    ) -> Any:
        noted(tensor, device)
        return copy(self, tensor, device, phase)

    def copied_into(
        self: Transfers, target: torch.Tensor, source: torch.Tensor, phase: str
    ) -> None:
        noted(source, target.device)
        copy_into(self, target, source, phase)

    with mock.patch.multiple(Transfers, copy=copied, copy_into=copied_into):
        yield crossed


if __name__ == "__main__":
    load_built()
    torch.set_num_threads(1)
    print(json.dumps(count(sys.argv[1], int(sys.argv[2]))))
