"""The contenders that need a process per replica: gloo workers on this machine."""

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
        self._ranks.ask(_start, world, kind, (case.name, case.batch, case.accum))

    def step(self) -> float:
        """The seconds of the slowest rank."""
        return max(self._ranks.ask(_call, "step"))

    def gradient(self) -> Tensor:
        """As ``Peer.gradient``; all ranks have the same."""
        gradient: Tensor = self._ranks.ask(_call, "gradient")[0]
        return gradient

    def traffic(self) -> list[dict[str, int]]:
        """What each rank counted in one step."""
        return self._ranks.ask(_call, "traffic")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.__exit__(*error)


def _start(rank: int, world: int, kind: str, size: tuple[str, int, int]) -> None:
    """Make the worker of this process."""
    # accelerate reads these
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for variables, value in zip(names, (rank, world), strict=True):
        os.environ.update(dict.fromkeys(variables, str(value)))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    name, batch, accum = size
    _workers.append(
        KINDS[kind](Case(name, CASES[name].build, batch, accum), rank, world)
    )


def _call(_: int, method: str) -> Any:
    """Call a method of this process's worker."""
    return getattr(_workers[0], method)()


class NoSync(Peer):
    """``DistributedDataParallel``, all sub-steps but the last under ``no_sync``."""

    wrapper: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel

    def __init__(self, case: Case, rank: int, world: int) -> None:
        super().__init__(case.module(), self.accumulate)
        self.model: Any = self.wrapper(self.module)
        self.batch = _share(case, rank, world)

    def accumulate(self) -> None:
        last = len(self.batch) - 1
        for number, (images, labels) in enumerate(self.batch):
            with nullcontext() if number == last else self.model.no_sync():
                (criterion(self.model(images), labels) / len(self.batch)).backward()


class CountingModel(nn.parallel.DistributedDataParallel):
    """Counts what it broadcasts; what it reduces is counted by a communication hook."""

    broadcast_bytes = 0
    broadcasts = 0

    def _distributed_broadcast_coalesced(
        self, tensors: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.broadcast_bytes += sum(t.numel() * t.element_size() for t in tensors)
        self.broadcasts += 1
        super()._distributed_broadcast_coalesced(tensors, *args, **kwargs)


class Counted(NoSync):
    """The same, with every collective counted."""

    wrapper = CountingModel

    def __init__(self, case: Case, rank: int, world: int) -> None:
        super().__init__(case, rank, world)
        self.buckets: list[int] = []
        self.model.register_comm_hook(None, self._reduce)
        self.step()  # the first one is when buckets are rebuilt

    def _reduce(
        self, _: None, bucket: distributed.GradBucket
    ) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        self.buckets.append(flat.numel() * flat.element_size())
        flat.div_(distributed.get_world_size())
        reduced = distributed.all_reduce(flat, async_op=True).get_future()
        return reduced.then(lambda future: future.value()[0])

    def traffic(self) -> dict[str, int]:
        self.buckets.clear()
        self.model.broadcast_bytes = self.model.broadcasts = 0
        self.step()
        tensors = [tensor for micro in self.batch for tensor in micro]
        return {
            "inputs": sum(t.numel() * t.element_size() for t in tensors),
            "buffers": self.model.broadcast_bytes,
            "broadcasts": self.model.broadcasts,
            "gradients": sum(self.buckets),
            "reductions": len(self.buckets),
        }


class Accelerated(Peer):
    """``accelerate``: ``accumulate`` and ``backward`` of an ``Accelerator``."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        from accelerate import Accelerator

        super().__init__(case.module(), self.accumulate)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accum)
        self.model = self.accelerator.prepare(self.module)
        self.batch = _share(case, rank, world)

    def accumulate(self) -> None:
        for images, labels in self.batch:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(criterion(self.model(images), labels))


KINDS: dict[str, Callable[[Case, int, int], Any]] = {
    "engine": lambda case, rank, world: peers.engine(case, ["cpu"] * 2),
    "ddp": NoSync,
    "ddp, counted": Counted,
    "accelerate": Accelerated,
}


def _share(case: Case, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = (part.chunk(world)[rank].clone() for part in case.data())
    return list(zip(images.chunk(case.accum), labels.chunk(case.accum), strict=True))
