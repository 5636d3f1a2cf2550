"""The contenders that need a process per replica: gloo workers on this machine, kept running.

Workers start once, wait for commands on a pipe, and end by themselves: with the pipe, with
the parent, or when nothing came for a while.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn

from benchmarks import peers
from benchmarks.models import CASES, Case
from benchmarks.peers import Peer, criterion

_IDLE_SECONDS = 900.0
_REPLY_SECONDS = 300.0


class Gang:
    """``world`` processes that step together. ``kind`` is a name in ``KINDS``."""

    def __init__(self, kind: str, case: Case, world: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes = []
        for rank in range(world):
            here, there = spawn.Pipe()
            size = (case.name, case.batch, case.accum)
            arguments = (there, kind, size, rank, world, port)
            spawn.Process(target=_serve, args=arguments, daemon=True).start()
            there.close()
            self._pipes.append(here)
        self._replies()

    def step(self) -> float:
        """The seconds of the slowest rank."""
        return max(self._ask("step"))

    def gradient(self) -> Tensor:
        """As ``Peer.gradient``; all ranks have the same."""
        return torch.tensor(self._ask("gradient")[0])

    def traffic(self) -> list[dict[str, int]]:
        """What each rank counted in one step."""
        return self._ask("traffic")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()

    def _ask(self, command: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return self._replies()

    def _replies(self) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_REPLY_SECONDS):
                raise TimeoutError(f"rank {rank} said nothing for {_REPLY_SECONDS} s")
        return [pipe.recv() for pipe in self._pipes]


def _serve(
    pipe: Any, kind: str, size: tuple[str, int, int], rank: int, world: int, port: int
) -> None:
    budget = max(1, torch.get_num_threads() // world)
    torch.set_num_threads(budget)
    os.environ.update(
        OMP_NUM_THREADS=str(budget),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    name, batch, accum = size
    worker = KINDS[kind](Case(name, CASES[name].build, batch, accum), rank, world)
    pipe.send("ready")
    while pipe.poll(_IDLE_SECONDS):
        try:
            command = pipe.recv()
        except EOFError:
            break
        reply = getattr(worker, command)()
        pipe.send(reply.tolist() if isinstance(reply, Tensor) else reply)
    if distributed.is_initialized():
        distributed.destroy_process_group()


class NoSync(Peer):
    """``DistributedDataParallel``, all sub-steps but the last under ``no_sync``."""

    wrapper: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel

    def __init__(self, case: Case, rank: int, world: int) -> None:
        limit = timedelta(seconds=_REPLY_SECONDS)
        distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
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

    def _distributed_broadcast_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
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

    def _reduce(self, _: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
