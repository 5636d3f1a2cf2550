"""How the processes that torchrun started find each other, also after a restart.

torchrun keeps one key-value store over all its restarts, and what processes that have died
wrote there is still in it: a new process could read the address of a dead one (torch's issue
135712). So the first rank gives every attempt a number of its own, and the processes use keys
of that attempt alone.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PAUSE_SECONDS = 0.02


def meet(timeout: timedelta) -> None:
    """Make the default process group of all ranks of this attempt."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = of_this_attempt(store, rank, size, timeout)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timeout)


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

    Every rank asks with a word of its own and confirms the answer; a question left from an
    earlier attempt is answered too, but nobody confirms it.

    Raises:
        TimeoutError: a rank did not come in time.
    """
    if rank == 0:
        attempt = str(store.add("attempts", 1))
        _answer(store, attempt, size, time.monotonic() + timeout.total_seconds())
    else:
        word = uuid.uuid4().hex
        store.set(f"asked by {rank}", word)
        attempt = store.get(f"answer to {word}").decode()
        store.set(f"attempt {attempt} has {rank}", "")
    return PrefixStore(f"attempt {attempt}", store)


def _answer(store: Store, attempt: str, size: int, deadline: float) -> None:
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"attempt {attempt} has {rank}"]):
                missing.discard(rank)
            elif store.check([f"asked by {rank}"]):
                store.set(f"answer to {store.get(f'asked by {rank}').decode()}", attempt)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not come in time")
        time.sleep(_PAUSE_SECONDS)
