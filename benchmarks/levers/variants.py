"""The engine with one lever switched off, in a process of its own: some cannot be undone."""

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models import Case
from scatterpar import ScatterOnceParallel
from scatterpar.devices import runtime
from scatterpar.threads import workers

KEPT = "engine, all levers on"


class Variant:
    """One step of the engine on two replicas, as a gang of one process runs it."""

    def __init__(
        self, case: Case, rank: int, world: int, lever: str, compile: bool = False
    ) -> None:
        LEVERS[lever]()
        self.respawn = lever == "a thread per replica and step"
        memories = ["cpu:0", "cpu:1"] if lever == "parameters copied, not shared" else ["cpu"] * 2
        self.module = case.module()
        self.engine = ScatterOnceParallel(self.module, case.accum, memories, compile=compile)
        self.batch = case.data()
        self.criterion = nn.CrossEntropyLoss()

    def step(self) -> float:
        self.module.zero_grad()
        start = time.perf_counter()
        self.engine.forward_backward(*self.batch, self.criterion)
        if self.respawn:
            self.engine._workers._stop()
        return time.perf_counter() - start

    def gradient(self) -> list[float]:
        self.module.eval()
        self.step()
        self.module.train()
        return torch.cat([p.grad.flatten() for p in self.module.parameters()]).tolist()


def _give_memory_back() -> None:
    runtime.tune_malloc = lambda device: None


def _all_cores_each() -> None:
    serve, cores = workers._serve, torch.get_num_threads()
    workers._serve = lambda queue, budget, ready: serve(queue, cores, ready)


LEVERS: dict[str, Callable[[], None]] = {
    KEPT: lambda: None,
    "freed memory given back": _give_memory_back,
    "all cores for each worker": _all_cores_each,
    "a thread per replica and step": lambda: None,
    "parameters copied, not shared": lambda: None,
}
