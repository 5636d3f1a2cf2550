"""The contenders that need a process per replica: gloo workers on this machine.

::

    engine          one process with two replicas
    ddp             for each micro-batch, all except the last under no_sync():
                        (criterion(model(x), y) / accum).backward()
    ddp, counted    the same, with every collective counted
    accelerate      for each micro-batch: with accelerator.accumulate(model):
                        accelerator.backward(criterion(model(x), y))
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn

from benchmarks import peers
from benchmarks.models import CASES, Case
from benchmarks.peers import Peer, criterion
from benchmarks.ranks import Ranks

_SECONDS = 300.0  # the longest wait for a step
_workers: list[Any] = []  # the worker of this process


class RankProcesses:
    """``world`` processes that step together. ``kind`` is a name in ``KINDS``."""

    def __init__(self, kind: str, case: Case, world: int) -> None:
        self._ranks = Ranks([torch.device("cpu")] * world, _SECONDS)
        self._ranks.ask(_start, world, kind, case.size)

    def step(self) -> float:
        """The seconds of the slowest rank."""
        return max(self._ranks.ask(_call, "step"))

    def gradient(self) -> Tensor:
        """As ``Peer.gradient``; all ranks have the same."""
        gradient: Tensor = self._ranks.ask(_call, "gradient")[0]
        return gradient

    def traffic(self) -> list[dict[str, int]]:
        """The counts of one step, by rank."""
        return self._ranks.ask(_call, "traffic")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.__exit__(*error)


def _start(rank: int, world: int, kind: str, size: tuple[str, int, int]) -> None:
    """Make the worker of this process."""
    # accelerate reads these variables.
    for variable in ("RANK", "LOCAL_RANK"):
        os.environ[variable] = str(rank)
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[variable] = str(world)
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    make_worker = KINDS[kind]
    _workers.append(make_worker(case_of(size), rank, world))


def _call(_: int, method: str) -> Any:
    """Call a method of this process's worker."""
    return getattr(_workers[0], method)()


def case_of(size: tuple[str, int, int]) -> Case:
    """The case whose ``size`` came to this process; its functions cannot be pickled."""
    name, batch, accum = size
    return Case(name, CASES[name].build, batch, accum)


def share_of(case: Case, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one rank, in memory of their own."""
    images, labels = case.data()
    return images.chunk(world)[rank].clone(), labels.chunk(world)[rank].clone()


class NoSync(Peer):
    """``DistributedDataParallel``, all sub-steps except the last under ``no_sync``."""

    wrapper: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel

    def __init__(self, case: Case, rank: int, world: int) -> None:
        super().__init__(case.module(), self.accumulate)
        self.model: Any = self.wrapper(self.module)
        self.micro_batches = _micro_batches(case, rank, world)

    def accumulate(self) -> None:
        count = len(self.micro_batches)
        for number, (images, labels) in enumerate(self.micro_batches, 1):
            with nullcontext() if number == count else self.model.no_sync():
                loss = criterion(self.model(images), labels)
                (loss / count).backward()


class CountingModel(nn.parallel.DistributedDataParallel):
    """Counts its broadcasts. A communication hook counts its reductions."""

    broadcast_bytes = 0
    broadcasts = 0

    def _distributed_broadcast_coalesced(
        self, tensors: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.broadcast_bytes += sum(tensor.nbytes for tensor in tensors)
        self.broadcasts += 1
        super()._distributed_broadcast_coalesced(tensors, *args, **kwargs)


class Counted(NoSync):
    """The same, with every collective counted."""

    wrapper = CountingModel

    def __init__(self, case: Case, rank: int, world: int) -> None:
        super().__init__(case, rank, world)
        self.buckets: list[int] = []
        self.model.register_comm_hook(None, self._reduce)
        self.step()  # DDP rebuilds its buckets after the first one

    def _reduce(
        self, _: None, bucket: distributed.GradBucket
    ) -> torch.futures.Future[Tensor]:
        """Average a bucket over the ranks, as DDP does by itself."""
        flat = bucket.buffer()
        self.buckets.append(flat.nbytes)
        flat.div_(distributed.get_world_size())
        reduced = distributed.all_reduce(flat, async_op=True).get_future()
        return reduced.then(lambda future: future.value()[0])

    def traffic(self) -> dict[str, int]:
        """Bytes, broadcasts and reductions of one step."""
        self.buckets.clear()
        self.model.broadcast_bytes = 0
        self.model.broadcasts = 0
        self.step()
        inputs = 0
        for images, labels in self.micro_batches:
            inputs += images.nbytes + labels.nbytes
        return {
            "inputs": inputs,
            "buffers": self.model.broadcast_bytes,
            "broadcasts": self.model.broadcasts,
            "gradients": sum(self.buckets),
            "reductions": len(self.buckets),
        }


class Accelerated(Peer):
    """``accelerate``: ``accumulate`` and ``backward`` of an ``Accelerator``."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        from accelerate import Accelerator  # slow, and the other kinds go without

        super().__init__(case.module(), self.accumulate)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accum)
        self.model = self.accelerator.prepare(self.module)
        self.micro_batches = _micro_batches(case, rank, world)

    def accumulate(self) -> None:
        for images, labels in self.micro_batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(criterion(self.model(images), labels))


def _engine(case: Case, rank: int, world: int) -> Peer:
    return peers.engine(case, ["cpu"] * 2)


KINDS: dict[str, Callable[[Case, int, int], Any]] = {
    "engine": _engine,
    "ddp": NoSync,
    "ddp, counted": Counted,
    "accelerate": Accelerated,
}


def _micro_batches(case: Case, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = share_of(case, rank, world)
    return list(zip(images.chunk(case.accum), labels.chunk(case.accum), strict=True))
