"""Processes with a process group, one per GPU or CPU replica, that call functions."""

from __future__ import annotations

import _thread
import atexit
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from scatterpar.devices.virtual_devices import physical

_SPAWN = multiprocessing.get_context("spawn")


class Ranks:
    """Processes that share a process group: NCCL's on GPUs, gloo's on the CPU.

    They start with the first call of ``ask``, which must be for all of them.

    Args:
        devices: the device of each process.
        seconds: the longest wait for a result, and for another process.
    """

    def __init__(self, devices: Sequence[torch.device], seconds: float = 100.0) -> None:
        self._seconds = seconds
        # The processes find each other in this folder.
        self._folder = tempfile.TemporaryDirectory()
        self._processes = []
        for rank, device in enumerate(devices):
            arguments = rank, device, len(devices), self._folder.name, seconds
            process = ProcessPoolExecutor(1, _SPAWN, _join, arguments)
            self._processes.append(process)

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns ``function(rank, *args)`` of each process.

        Raises the error of a process, or ``TimeoutError``.
        """
        # All are submitted before any result is awaited: ranks wait for each other.
        futures = []
        for rank, process in enumerate(self._processes):
            futures.append(process.submit(function, rank, *args))
        return [future.result(self._seconds) for future in futures]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process in self._processes:
            # After an error a process may wait for another one forever.
            process.shutdown(wait=kind is None)


def _join(
    rank: int, device: torch.device, count: int, folder: str, seconds: float
) -> None:
    """Begin this process: join the group, on ``device``."""
    _thread.start_new_thread(_end_with_parent, ())
    # Gloo's threads can abort a process that ends in the usual way.
    atexit.register(os._exit, 0)
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(physical(device))
    dist.init_process_group(
        backend,
        f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
    )


def _end_with_parent() -> None:
    """End this process when its parent has ended, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
