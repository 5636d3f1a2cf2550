"""Where a run computes: its devices, and its machines: one process each, started by torchrun."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from scatterpar.devices.verbs import resolve
from scatterpar.train.data import UsageError, words_of

_LONGEST_WAIT = timedelta(minutes=10)  # for a machine that was lost without a word
_PAUSE_SECONDS = 0.02
_CPU_REPLICAS = 4


def choose_devices(names: str | None) -> list[torch.device]:
    """Turn `--devices` into a device for each replica, the master's first.

    Without names: every accelerator, else four CPU replicas with a memory of their own each
    (`cpu:0` and so on), so that what crosses is copied and counted as between GPUs.

    Raises:
        UsageError: a name is no device, or the device is not there.

    >>> choose_devices("cpu:0,cpu:1")
    [device(type='cpu', index=0), device(type='cpu', index=1)]
    """
    if names is None and not torch.accelerator.is_available():
        return [torch.device("cpu", i) for i in range(_CPU_REPLICAS)]
    try:
        return list(resolve(None if names is None else [n.strip() for n in names.split(",")]))
    except ValueError as error:
        words = words_of(error).removeprefix("device_ids: ")
        raise UsageError(
            f"--devices: {words}; name them like cuda:0,cuda:1 or cpu:0,cpu:1"
        ) from error


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
        """Return every rank's value, in rank order: numbers, strings, tensors, dicts, lists."""
        return [self.from_rank(rank, value) for rank in range(self.size)]

    def from_rank(self, source: int, value: Any) -> Any:
        """Return the value of rank `source`; the others' is not looked at."""
        if self.group is None:
            return value
        mine = to_bytes(value) if self.rank == source else b""
        length = self.largest(len(mine))
        data = torch.frombuffer(bytearray(mine or length), dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=source)
        return from_bytes(data.numpy().tobytes())


def to_bytes(value: Any) -> bytes:
    """Encode what a checkpoint may hold."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Decode what `to_bytes` made, onto the CPU; nothing in it is executed."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@contextlib.contextmanager
def connected(devices: list[torch.device]) -> Iterator[Machines]:
    """Meet the other machines where torchrun started this process; otherwise open no port.

    Tensors on the host go by gloo, those on NVIDIA GPUs by NCCL.

    Raises:
        UsageError: torchrun started several processes on a machine with accelerators.
    """
    require_one_process(devices)
    if not launched():
        yield Machines()
        return
    store, rank, size = next(rendezvous("env://", timeout=_LONGEST_WAIT))
    store = of_this_attempt(store, rank, size, _LONGEST_WAIT)
    dist.init_process_group(
        backend(), store=store, rank=rank, world_size=size, timeout=_LONGEST_WAIT
    )
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
    """Make sure that no other process of this machine uses the same accelerators."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1
    if here > 1 and any(device.type != "cpu" for device in devices):
        raise UsageError(
            f"torchrun started {here} processes on this machine, but one uses all its devices: "
            "launch with --nproc-per-node=1"
        )


def backend() -> str:
    """Gloo for tensors on the host, and the accelerator's own library those on cards.

    Without a name torch takes the accelerator's alone.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return dist.Backend.GLOO
    library = dist.get_default_backend_for_device(accelerator)
    if library == dist.Backend.NCCL and not dist.is_nccl_available():  # Windows
        library = dist.Backend.GLOO
    return f"cpu:gloo,{accelerator.type}:{library}"


def of_this_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """The part of `store` that only the processes of this attempt use.

    torchrun keeps one key-value store over all its restarts, and a new process could read there the
    address of one that has died (torch's issue 135712). So the first rank numbers the attempts, and
    each has keys of its own. Every rank asks with a word of its own and confirms the answer; a
    question left from an earlier attempt is answered too, but nobody confirms it.

    Raises:
        TimeoutError: a rank did not come in time.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"asked by {rank}", word)
        attempt = store.get(f"answer to {word}").decode()
        store.set(f"attempt {attempt} has {rank}", "")
        return PrefixStore(f"attempt {attempt}", store)
    attempt = str(store.add("attempts", 1))
    deadline, missing = time.monotonic() + timeout.total_seconds(), set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"attempt {attempt} has {other}"]):
                missing.discard(other)
            elif store.check([f"asked by {other}"]):
                store.set(f"answer to {store.get(f'asked by {other}').decode()}", attempt)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not come in time")
        time.sleep(_PAUSE_SECONDS)
    return PrefixStore(f"attempt {attempt}", store)
