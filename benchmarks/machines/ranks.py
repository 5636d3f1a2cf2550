"""Gloo ranks on this machine that run contenders in turn, and time them.

::

    for each round:                             the order alternates
        for the engine and DDP: zero_grad; barrier; a timed step; optimizer.step()

Of the ranks the slowest one of each round counts.
"""

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import Case
from benchmarks.peers import criterion
from benchmarks.processes import NoSync, case_of, share_of
from benchmarks.ranks import Ranks
from benchmarks.timing import timed
from scatterpar import ScatterOnceParallel

_LIMIT_SECONDS = 300.0
_REPEATS = 31  # of a collective, of which the median counts
ENGINE = "engine, process_group="
DDP = "DistributedDataParallel, no_sync"


def measure(case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """The results of rank 0, with the slowest rank's seconds of each round."""
    with Ranks([torch.device("cpu")] * ranks, _LIMIT_SECONDS) as processes:
        results = processes.ask(_measure, ranks, case.size, rounds)
    slowest = {}
    for name in (ENGINE, DDP):
        by_rank = [result["seconds"][name] for result in results]
        slowest[name] = [max(times) for times in zip(*by_rank, strict=True)]
    return {**results[0], "seconds": slowest}


def _measure(
    rank: int, ranks: int, size: tuple[str, int, int], rounds: int
) -> dict[str, Any]:
    """In one of the processes: the results of this rank."""
    case = case_of(size)
    return {**_steps(case, rank, ranks, rounds), **_pieces(case)}


def _steps(case: Case, rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Both train on the same rows. Returns their seconds, and how far they are apart."""
    images, labels = share_of(case, rank, ranks)
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
    seconds: dict[str, list[float]] = {ENGINE: [], DDP: []}
    order = [ENGINE, DDP]
    for _ in range(1 + rounds):  # the first round warms up
        for name in order:
            optimizers[name].zero_grad()
            dist.barrier()
            seconds[name].append(timed(steps[name]))
            optimizers[name].step()
        order.reverse()
    engine.close()
    expected = _joined(models[DDP])
    difference = (_joined(models[ENGINE]) - expected).norm() / expected.norm()
    return {
        "seconds": {name: times[1:] for name, times in seconds.items()},
        "difference": difference.item(),
        "steps": 1 + rounds,
    }


def _joined(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def _pieces(case: Case) -> dict[str, float]:
    """What a step between machines adds: two collectives, and packing the gradients."""
    parameters = [parameter.detach() for parameter in case.module().parameters()]
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))

    def all_reduce_flags() -> None:
        dist.all_reduce(torch.zeros(6, dtype=torch.float64))

    def all_reduce_gradients() -> None:
        dist.all_reduce(flat)

    def pack() -> None:
        sizes = [parameter.numel() for parameter in parameters]
        for view, parameter in zip(flat.split(sizes), parameters, strict=True):
            view.view(parameter.shape).copy_(parameter)
        flat.mul_(0.5)

    return {
        "small_seconds": _median(all_reduce_flags),
        "data_seconds": _median(all_reduce_gradients),
        "pack_seconds": _median(pack),
        "data_bytes": float(flat.nbytes),
    }


def _median(function: Any) -> float:
    return statistics.median(timed(function) for _ in range(_REPEATS))
