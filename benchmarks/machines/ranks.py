"""Gloo ranks on this machine that run contenders in turn, and time them."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import CASES, Case
from benchmarks.peers import criterion
from benchmarks.processes import NoSync
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel

_LIMIT_SECONDS = 300.0
ENGINE = "engine, process_group="
DDP = "DistributedDataParallel, no_sync"


def measure(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """What the ranks found: for times the slowest rank of each round."""
    with Ranks([torch.device("cpu")] * ranks, _LIMIT_SECONDS) as processes:
        size = case.name, case.batch, case.accum
        results = processes.ask(_measure, ranks, size, rounds)
    first = results[0]
    slowest = {}
    for name in first["seconds"]:
        of_ranks = [result["seconds"][name] for result in results]
        slowest[name] = [max(times) for times in zip(*of_ranks, strict=True)]
    return {**first, "seconds": slowest}


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
    optimizers = {}
    for name, model in models.items():
        optimizers[name] = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds + 1):
        for name in order:
            optimizers[name].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
            optimizers[name].step()
        order.reverse()
    engine.close()
    ours, theirs = (_joined(models[name]) for name in (ENGINE, DDP))
    difference = (ours - theirs).norm() / theirs.norm()
    return {
        "seconds": {name: times[1:] for name, times in seconds.items()},
        "difference": difference.item(),
        "steps": rounds + 1,
    }


def _joined(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def _pieces(case: Case) -> dict[str, float]:
    """What a step between machines adds: the small collective, and packing the
    gradients.
    """
    parameters = [parameter.detach() for parameter in case.module().parameters()]
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))

    def all_reduce_flags() -> None:
        dist.all_reduce(torch.zeros(6, dtype=torch.float64))

    return {
        "small_seconds": _median(all_reduce_flags),
        "data_seconds": _median(lambda: dist.all_reduce(flat)),
        "pack_seconds": _median(lambda: _pack(flat, parameters)),
        "data_bytes": float(flat.nbytes),
    }


def _pack(flat: Tensor, parameters: list[Tensor]) -> None:
    sizes = [parameter.numel() for parameter in parameters]
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
