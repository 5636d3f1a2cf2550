"""Processes of a process group, one for each GPU, that call functions when they are asked to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from scatterpar.devices.runtime import physical

_SECONDS = 100.0  # without an answer


class Ranks:
    """Processes that share a process group: NCCL's on GPUs, gloo's on the CPU.

    Args:
        count: how many.
        devices: the device of each process.
    """

    def __init__(self, count: int, devices: Sequence[torch.device]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()  # where the processes find each other
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = spawn.Pipe()
            arguments = there, rank, count, devices[rank], self._folder.name
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ask(self, function: Callable[..., Any], *args: Any, first: int | None = None) -> list[Any]:
        """What ``function(rank, *args)`` returns in each process, or in the first ones alone.

        Raises:
            RuntimeError: a process failed, ended, or said nothing.
        """
        pipes = self._pipes[:first]
        for pipe in pipes:
            pipe.send((function, args))
        return [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


def _answer(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(_SECONDS):
        raise RuntimeError(f"process {rank} said nothing for {_SECONDS:g} s")
    try:
        answer, error = pipe.recv()
    except EOFError:
        raise RuntimeError(f"process {rank} has ended") from None
    if error:
        raise RuntimeError(f"in process {rank}: {error}")
    return answer


def _serve(pipe: Connection, rank: int, count: int, device: torch.device, folder: str) -> None:
    """Join the group, and answer until nobody asks."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        dist.get_default_backend_for_device(physical(device)),
        f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_SECONDS),
    )
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((function(rank, *arguments), None))
            except Exception as error:
                pipe.send((None, f"{type(error).__name__}: {error}"))
    os._exit(0)  # gloo's threads can abort a process that ends in the usual way
