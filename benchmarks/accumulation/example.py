"""The published example: what is trained, and what five ways of training it make of it.

The batch has two halves. Each way averages the gradients of the halves' summed outputs, be a
half a micro-batch, a replica or a process.
"""

import multiprocessing
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from scatterpar import ScatterOnceParallel

PUBLISHED = [0.9472, 0.9440, 0.9527, 0.9687, 0.9570, 0.9343, 0.9411, 0.9186]
UPDATES = 2
_SECONDS = 120


def example() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """The layer of ones, its optimizer, and the batch of eight rows."""
    model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)
    torch.manual_seed(0)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.rand(8, 8)


def loop() -> list[float]:
    """Two micro-batches, one after the other."""
    model, optimizer, batch = example()
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for half in batch.chunk(2):
            (model(half).sum() / 2).backward()
        optimizer.step()
    return model.weight[0].tolist()


def engine(accum: int, device_ids: list[str]) -> list[float]:
    """The whole batch at once, cut by the engine into replicas and sub-steps."""
    model, optimizer, batch = example()
    with ScatterOnceParallel(model, accum, device_ids) as parallel:
        for _ in range(UPDATES):
            optimizer.zero_grad()
            parallel.forward_backward(batch, None, _half_of_the_sum, reduction="sum")
            optimizer.step()
    return model.weight[0].tolist()


def _half_of_the_sum(output: Tensor, _: None) -> Tensor:
    return output.sum() / 2


def ddp(accum: int) -> list[float]:
    """A process for each half, in ``accum`` micro-batches, all but the last under ``no_sync``."""
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here, there = spawn.Pipe(duplex=False)
    processes = [
        spawn.Process(target=_rank, args=(rank, accum, port, there if rank == 0 else None))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    if not here.poll(_SECONDS):
        raise TimeoutError(f"rank 0 said nothing for {_SECONDS} s")
    weights: list[float] = here.recv()
    for process in processes:
        process.join(_SECONDS)
    return weights


def _rank(rank: int, accum: int, port: int, pipe: Any) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_SECONDS),
    )
    model, optimizer, batch = example()
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        micro_batches = batch.chunk(2)[rank].chunk(accum)
        for number, rows in enumerate(micro_batches, start=1):
            with nullcontext() if number == accum else parallel.no_sync():
                parallel(rows).sum().backward()
        optimizer.step()
    if pipe is not None:
        pipe.send(model.weight[0].tolist())
    distributed.destroy_process_group()


WAYS: dict[str, Callable[[], list[float]]] = {
    "plain loop, 2 micro-batches": loop,
    "`DistributedDataParallel`, 2 processes": lambda: ddp(1),
    "the same, 2 micro-batches each, `no_sync`": lambda: ddp(2),
    "engine, 1 replica, `accum=2`": lambda: engine(2, ["cpu"]),
    "engine, 2 replicas": lambda: engine(1, ["cpu"] * 2),
    "engine, 2 replicas, `accum=2`": lambda: engine(2, ["cpu"] * 2),
    "engine, 2 virtual devices, `accum=2`": lambda: engine(2, ["cpu:0", "cpu:1"]),
}
