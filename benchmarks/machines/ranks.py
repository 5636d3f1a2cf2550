"""Gloo ranks on this machine that run contenders in turn, and time them."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import CASES, Case
from benchmarks.peers import criterion
from benchmarks.processes import NoSync
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel

_LIMIT_SECONDS = 300.0
ENGINE, DDP = "engine, process_group=", "DistributedDataParallel, no_sync"


def measure(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """What the ranks found: for times the slowest rank of each round."""
    with Ranks([torch.device("cpu")] * ranks, _LIMIT_SECONDS) as processes:
        found = processes.ask(
            _measure, ranks, (case.name, case.batch, case.accum), rounds
        )
    first = found[0]
    names = first["seconds"]
    return {
        **first,
        "seconds": {
            name: [
                max(times)
                for times in zip(*(one["seconds"][name] for one in found), strict=True)
            ]
            for name in names
        },
    }


def _measure(
    rank: int, ranks: int, size: tuple[str, int, int], rounds: int
) -> dict[str, Any]:
    name, batch, accum = size
    case = Case(name, CASES[name].build, batch, accum)
    return {**_steps(case, rank, ranks, rounds), **_pieces(case)}


def _steps(case: Case, rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Both train on the same rows; rounds are interleaved, and the order alternates."""
    images, labels = (part.chunk(ranks)[rank].clone() for part in case.data())
    ddp = NoSync(case, rank, ranks)
    models = {ENGINE: case.module(), DDP: ddp.module}
    engine = ScatterOnceParallel(
        models[ENGINE], case.accum, ["cpu"], process_group=dist.group.WORLD
    )
    steps = {
        ENGINE: lambda: engine.forward_backward(images, labels, criterion),
        DDP: ddp.accumulate,
    }
    optimizers = {
        who: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for who, model in models.items()
    }
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    order = list(steps)
    for _ in range(rounds + 1):
        for who in order:
            optimizers[who].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            steps[who]()
            seconds[who].append(time.perf_counter() - start)
            optimizers[who].step()
        order.reverse()
    engine.close()
    flat = {
        who: torch.cat([p.flatten() for p in m.parameters()])
        for who, m in models.items()
    }
    difference = (flat[ENGINE] - flat[DDP]).norm() / flat[DDP].norm()
    return {
        "seconds": {who: times[1:] for who, times in seconds.items()},
        "difference": difference.item(),
        "steps": rounds + 1,
    }


def _pieces(case: Case) -> dict[str, float]:
    """What a step between machines adds: the small collective, and packing the
    gradients.
    """
    parameters = [p.detach() for p in case.module().parameters()]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    return {
        "small_seconds": _median(
            lambda: dist.all_reduce(torch.zeros(6, dtype=torch.float64))
        ),
        "data_seconds": _median(lambda: dist.all_reduce(flat)),
        "pack_seconds": _median(lambda: _pack(flat, parameters)),
        "data_bytes": float(flat.numel() * 4),
    }


def _pack(flat: Tensor, parameters: list[Tensor]) -> None:
    sizes = [p.numel() for p in parameters]
    for view, parameter in zip(flat.split(sizes), parameters, strict=True):
        view.view(parameter.shape).copy_(parameter)
    flat.mul_(0.5)


def _median(function: Any) -> float:
    seconds = []
    for _ in range(31):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
