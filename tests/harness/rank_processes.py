"""Ranks for tests: processes that start once, run what they are given, and end by themselves."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import forks

SIZE = 3
_IDLE_SECONDS = 1800.0
_REPLY_SECONDS = 300.0


class RankProcesses:
    """``SIZE`` ranks over gloo on the loopback, for any number of tests."""

    def __init__(self) -> None:
        context = forks.context()
        self._processes = []
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes = []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, store), daemon=True)
            process.start()
            self._processes.append(process)
            there.close()
            self._pipes.append(here)

    @property
    def is_there(self) -> bool:
        """Whether all ranks wait for a test: idle ones end by themselves, and so may lost ones."""
        return all(process.is_alive() for process in self._processes)

    def run(self, size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``case(group, *args)`` returns on each of the first ``size`` ranks."""
        for pipe in self._pipes[:size]:
            pipe.send((size, case, args))
        answers = []
        for rank, pipe in enumerate(self._pipes[:size]):
            assert pipe.poll(_REPLY_SECONDS), f"rank {rank} said nothing for {_REPLY_SECONDS} s"
            answers.append(pipe.recv())
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"on rank {rank}: {failure}"
        return [value for _, value in answers]


_started: list[RankProcesses] = []


def run_on_ranks(size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``case(group, *args)`` returns on each of the first ``size`` ranks of all tests.

    The ranks are started again if they have ended.
    """
    if not _started or not _started[-1].is_there:
        _started.append(RankProcesses())
    return _started[-1].run(size, case, *args)


def _serve(pipe: Any, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=_REPLY_SECONDS / 3)
    file = dist.FileStore(store, SIZE)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=SIZE, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in (1, 2, SIZE)}
    while pipe.poll(_IDLE_SECONDS):
        try:
            size, case, args = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            pipe.send((None, case(groups[size], *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def failure(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """The type and the words, notes included, of what ``call`` raises."""
    try:
        call(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return None


_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("isend", "irecv", "recv", "send", "batch_isend_irecv"),
)


class Counted:
    """Counts the collectives of the body: for each, its name, dtype and bytes."""

    def __enter__(self) -> list[tuple[str, torch.dtype, int]]:
        self.calls: list[tuple[str, torch.dtype, int]] = []
        self._originals = {name: getattr(dist, name) for name in _COLLECTIVES}
        for name, original in self._originals.items():
            setattr(dist, name, functools.partial(self._call, name, original))
        return self.calls

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _call(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), torch.empty(0))
        self.calls.append((name, tensor.dtype, tensor.numel() * tensor.element_size()))
        return original(*args, **kwargs)
