"""New processes that call functions: one alone, or one per GPU with a process group."""

from __future__ import annotations

import _thread
import atexit
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from scatterpar.devices.device_ids import physical

_SPAWN = multiprocessing.get_context("spawn")


def run_alone(function: Callable[..., Any], *args: Any, under: str = "") -> Any:
    """``function(*args)``, called in a new process. Waits until the process has ended,
    too.

    ``under`` names a module whose ``install`` the process calls first, or is an empty
    string.
    """
    with ProcessPoolExecutor(1, _SPAWN, _prepare, (under,)) as process:
        return process.submit(function, *args).result()


def _prepare(under: str) -> None:
    _thread.start_new_thread(_end_with_parent, ())
    if under:
        importlib.import_module(under).install()


class Ranks:
    """Processes that share a process group: NCCL's on GPUs, gloo's on the CPU.

    They start with the first call of ``ask``, which must be for all of them.

    Args:
        devices: the device of each process.
        seconds: the longest wait for a result, and for another process.
    """

    def __init__(self, devices: Sequence[torch.device], seconds: float = 100.0) -> None:
        self._seconds = seconds
        # where the processes find each other
        self._folder = tempfile.TemporaryDirectory()
        common = len(devices), self._folder.name, seconds
        self._processes = [
            ProcessPoolExecutor(1, _SPAWN, _join, (rank, device, *common))
            for rank, device in enumerate(devices)
        ]

    def ask(
        self, function: Callable[..., Any], *args: Any, first: int | None = None
    ) -> list[Any]:
        """Returns ``function(rank, *args)`` of each process, or of the ``first`` ones.

        Raises the error of a process, or ``TimeoutError``.
        """
        processes = enumerate(self._processes[:first])
        results = [process.submit(function, rank, *args) for rank, process in processes]
        return [result.result(self._seconds) for result in results]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process in self._processes:
            # after an error a process may wait for another one
            process.shutdown(wait=kind is None)


def _join(
    rank: int, device: torch.device, count: int, folder: str, seconds: float
) -> None:
    """Join the group."""
    _thread.start_new_thread(_end_with_parent, ())
    # gloo's threads can abort a process that ends in the usual way
    atexit.register(os._exit, 0)
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        dist.get_default_backend_for_device(physical(device)),
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
