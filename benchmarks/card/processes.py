"""``DistributedDataParallel``: a process for each card, which steps when it is asked to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.card.contenders import Contender, Work, accumulate, works_of
from benchmarks.card.networks import NETWORKS
from scatterpar.devices.runtime import physical

_SECONDS = 100.0  # without an answer


class Processes:
    """DDP under ``no_sync`` but for the last sub-step, as one of the contenders.

    Args:
        network: its name.
        small: whether it is tiny.
        devices: one for each process.
        folder: where the processes find each other.

    Attributes:
        peaks: the most bytes that each card has held for it.
    """

    def __init__(
        self, network: str, small: bool, devices: Sequence[torch.device], folder: Path
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        names = [str(device) for device in devices]
        self.peaks: dict[str, int] = {}
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(len(devices)):
            here, there = spawn.Pipe()
            arguments = (there, network, small, names, rank, folder)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def apart(self, expected: Path) -> float:
        """How far its gradient is from the one in a file."""
        return max(self._ask("apart", expected))

    def step(self, size: str) -> float:
        """The seconds of the slowest process; the memory is noted."""
        found = self._ask("step", size)
        for _, peaks in found:
            self.peaks |= peaks
        return max(seconds for seconds, _ in found)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()

    def _ask(self, *question: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return [self._reply(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def _reply(self, rank: int, pipe: Connection) -> Any:
        if not pipe.poll(_SECONDS):
            raise TimeoutError(f"process {rank} said nothing for {_SECONDS:g} s")
        try:
            answer, error = pipe.recv()
        except EOFError:
            raise RuntimeError(f"process {rank} has ended") from None
        if error:
            raise RuntimeError(f"in process {rank}: {error}")
        return answer


def _serve(
    pipe: Connection, network: str, small: bool, names: Sequence[str], rank: int, folder: Path
) -> None:
    """What a process does: answer, until nobody is there to ask."""
    worker = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, *arguments = pipe.recv()
            try:
                worker = worker or _Worker(network, small, names, rank, folder)
                pipe.send((getattr(worker, what)(*arguments), None))
            except Exception as error:
                pipe.send((None, f"{type(error).__name__}: {error}"))
    os._exit(0)  # gloo's threads can abort a process that ends in the usual way


class _Worker:
    def __init__(
        self, name: str, small: bool, names: Sequence[str], rank: int, folder: Path
    ) -> None:
        devices = [torch.device(device) for device in names]
        device = devices[rank]
        network = NETWORKS[name](device, small)
        works = works_of(network, [device], rank)
        _join(device, rank, len(devices), folder)

        def make() -> tuple[nn.Module, Any]:
            module = network.module(device)
            ids = None if device.type == "cpu" else [device.index]
            parallel = DistributedDataParallel(module, ids)

            def run(work: Work) -> None:
                def around(is_last: bool) -> Any:
                    return contextlib.nullcontext() if is_last else parallel.no_sync()

                accumulate(network, parallel, work, device, around)

            return module, run

        self._contender = Contender(make, [device], works)

    def apart(self, expected: Path) -> float:
        return self._contender.apart(expected)

    def step(self, size: str) -> tuple[float, dict[str, int]]:
        dist.barrier()  # nobody's start is another's waiting
        return self._contender.step(size), self._contender.peaks


def _join(device: torch.device, rank: int, count: int, folder: Path) -> None:
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        dist.get_default_backend_for_device(physical(device)),
        store=dist.FileStore(str(folder / "store"), count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_SECONDS),
    )
