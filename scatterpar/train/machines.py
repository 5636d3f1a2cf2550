"""The machines of a run: one process each, started by torchrun, or this process alone."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scatterpar.train.errors import UsageError
from scatterpar.train.meeting import meet
from scatterpar.train.wire import from_bytes, to_bytes

_LONGEST_WAIT = timedelta(minutes=10)  # for a machine that was lost without a word


class Machines:
    """The ranks of a run and what they tell each other; all ranks make the same calls.

    >>> alone = Machines()
    >>> alone.rank, alone.size, alone.is_first
    (0, 1, True)
    >>> alone.share(torch.arange(3)).tolist(), alone.largest(15)
    ([0, 1, 2], 15)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of `rows`, in order; sizes differ by at most one."""
        return torch.tensor_split(rows, self.size)[self.rank]

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        found = torch.tensor(number)
        if self.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def everyones(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; `wire` says what can be sent."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
        padded = torch.zeros(self.largest(len(mine)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self.group)
        return [from_bytes(data.numpy().tobytes()) for data in received]

    def from_rank(self, source: int, value: Any) -> Any:
        """Return the value of rank `source`; the others' is not looked at."""
        if self.group is None:
            return value
        mine = to_bytes(value) if self.rank == source else b""
        length = torch.tensor(len(mine))
        dist.broadcast(length, group=self.group, group_src=source)
        data = torch.frombuffer(bytearray(mine or int(length)), dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=source)
        return from_bytes(data.numpy().tobytes())


@contextlib.contextmanager
def connected() -> Iterator[Machines]:
    """Meet the other machines where torchrun started this process; otherwise open no port.

    Tensors on the host go by gloo, those on NVIDIA GPUs by NCCL.
    """
    if not launched():
        yield Machines()
        return
    meet(_LONGEST_WAIT)
    machines = Machines(dist.group.WORLD)
    yield machines
    machines.group = None
    dist.destroy_process_group()  # not after an error, when others may be gone and it could wait
    gc.collect()  # what still holds the group would end its threads while the interpreter exits


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def run_id() -> str | None:
    """The job's name with torchrun, its `--rdzv-id`; None without torchrun."""
    return os.environ["TORCHELASTIC_RUN_ID"] if launched() else None


def was_restarted() -> bool:
    """Whether torchrun has started this process again, after one that failed."""
    return launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def require_one_process(devices: list[torch.device]) -> None:
    """Make sure that no other process of this machine uses the same accelerators.

    Raises:
        UsageError: torchrun started several processes on a machine with accelerators.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1
    if here > 1 and any(device.type != "cpu" for device in devices):
        raise UsageError(
            f"torchrun started {here} processes on this machine, but one uses all its devices: "
            "launch with --nproc-per-node=1"
        )
