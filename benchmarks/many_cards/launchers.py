"""Eight replicas in one, two and four processes: who launches the kernels?

A ResNet-50 that computes next to nothing, so that a step lasts as long as Python takes to
call its operators. All programs have eight replicas with the same rows::

    1 process     ScatterOnceParallel(net, accum, [cpu] * 8)
    2 processes   each: ScatterOnceParallel(net, accum, [cpu] * 4, process_group=group)
    4 processes   each: ScatterOnceParallel(net, accum, [cpu] * 2, process_group=group)

They take turns, a step each per round. A process that waits for its turn sleeps.
"""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.interpreter.modules import TinyResNet50
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel

REPLICAS = 8
_ROWS = 2  # of a sub-step
_SIDE = 4  # of an image
_CLASSES = 4
_WARM_UPS = 2

_state: dict[str, object] = {}  # of this process, between calls


def measure(counts: list[int], rounds: int, accum: int) -> dict[int, list[float]]:
    """The seconds of steps by the number of processes; one entry per round."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with contextlib.ExitStack() as stack:
        groups: dict[int, Ranks] = {}
        for count in counts:
            devices = [torch.device("cpu")] * count
            groups[count] = stack.enter_context(Ranks(devices))
            groups[count].ask(_prepare, REPLICAS // count, accum)
        for number in range(_WARM_UPS + rounds):
            for count, group in groups.items():
                slowest = max(group.ask(_step))
                if number >= _WARM_UPS:
                    seconds[count].append(slowest)
    return seconds


def _prepare(rank: int, replicas: int, accum: int) -> None:
    """Make this process's engine and batch."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    process_group = group if dist.get_world_size() > 1 else None
    engine = ScatterOnceParallel(
        TinyResNet50(),
        accum,
        ["cpu"] * replicas,
        process_group=process_group,
        verify=False,
    )
    rows = _ROWS * accum * replicas
    _state["engine"] = engine
    _state["images"] = torch.randn(rows, 3, _SIDE, _SIDE)
    _state["labels"] = torch.arange(rows) % _CLASSES


def _step(rank: int) -> float:
    """Take one step. Returns its seconds."""
    engine = _state["engine"]
    assert isinstance(engine, ScatterOnceParallel)
    engine.module.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    engine.forward_backward(
        _state["images"], _state["labels"], nn.functional.cross_entropy
    )
    return time.perf_counter() - start
