"""How long the host is at work in a step, in a process of its own; what cards would do
apart.

``SIMULATED_ACCELERATOR=…/accelerator.so python -m benchmarks.many_cards.host resnet101
4`` prints one line of JSON: seconds of CPU time, by step and by who takes them, without
what the simulated accelerator takes itself. The model is thin: as many tensors as the
real one has, and small ones, so that its kernels leave the processor's caches alone.
"""

import gc
import json
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from simulated import NAME, control, load_built
from torch import Tensor, nn

from benchmarks.many_cards.count import Bare, gpt2
from benchmarks.models import ResNet101Tree
from scatterpar import ScatterOnceParallel
from scatterpar.threads import clock

MODELS = {
    "resnet101": (lambda: ResNet101Tree(4), torch.float32),
    "gpt2": (lambda: gpt2(width=8, words=64, positions=16), torch.bfloat16),
}
STEPS = ("first", "later", "kept")
_REPEATS = 9


class Watch:
    """Who takes how much of the host's time.

    Attributes:
        workers: seconds of the replicas' threads, but for forward and backward passes.
        handing_over: seconds of autograd's threads while the caller's waits for a
            backward pass.
    """

    def __init__(self) -> None:
        self.workers = self.handing_over = 0.0
        self._lock = threading.Lock()
        self._caller = threading.get_ident()
        self._since = threading.local()
        self._backward = torch.autograd.backward

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Leave out the body, in a replica's thread: it is a forward or a backward
        pass.
        """
        now, _ = control.host_seconds()
        with self._lock:
            self.workers += now - getattr(self._since, "seconds", 0.0)
        yield
        self._since.seconds, _ = control.host_seconds()

    def backward(self, *arguments: Any, **options: Any) -> None:
        """``torch.autograd.backward``, in a worker's sub-step or in the caller's
        commit.
        """
        if threading.get_ident() != self._caller:
            with self.passing():
                self._backward(*arguments, **options)
            return
        own, everyone = control.host_seconds()
        self._backward(*arguments, **options)
        own_now, everyone_now = control.host_seconds()
        self.handing_over += (everyone_now - everyone) - (own_now - own)


class Watched(nn.Module):
    """A module whose forward passes are left out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: Tensor) -> Tensor:
        """What the module computes."""
        with WATCH.passing():
            return self.module(rows)


WATCH = Watch()


def measure(name: str, devices: int) -> dict[str, dict[str, float]]:
    """Seconds by step and by who takes them; of later steps the median of some."""
    build, dtype = MODELS[name]
    model = Watched(Bare(build().to(dtype))).to(f"{NAME}:0")
    rows = torch.ones(devices, 1, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    found: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        for number in range(_REPEATS):
            for step in STEPS[number > 0 :]:
                if step != "kept":
                    optimizer.zero_grad()
                found[step].append(_measured(engine, rows, devices))
                optimizer.step()
    return {
        step: {who: statistics.median(one[who] for one in each) for who in each[0]}
        for step, each in found.items()
    }


def _measured(
    engine: ScatterOnceParallel, rows: Tensor, devices: int
) -> dict[str, float]:
    for index in range(devices):
        torch.accelerator.synchronize(index)
    gc.collect()
    WATCH.workers = WATCH.handing_over = 0.0
    before, _ = control.host_seconds()
    engine.forward_backward(rows)
    caller = control.host_seconds()[0] - before + WATCH.handing_over
    report = engine.last_step
    assert report is not None
    rest = caller - sum(report.seconds.values())
    return {
        **report.seconds,
        "commit": rest,
        "caller": caller,
        "workers": WATCH.workers,
    }


def _import_what_steps_need() -> None:
    """Torch and the engine import some things when they are first used."""
    model = Watched(nn.Linear(1, 1)).to(f"{NAME}:0")
    with ScatterOnceParallel(model, 1, [0, 1], verify=False) as engine:
        for _ in range(2):
            engine.forward_backward(
                torch.ones(2, 1), None, lambda output, _: output.sum()
            )


def main(name: str, devices: int) -> None:
    """Print what was found."""
    load_built()
    torch.set_num_threads(1)
    gc.disable()
    phases = SimpleNamespace(perf_counter=lambda: control.host_seconds()[0])
    with (
        mock.patch.object(torch.autograd, "backward", WATCH.backward),
        # the engine's phases are in the host's time
        mock.patch.object(clock, "time", phases),
    ):
        _import_what_steps_need()
        print(json.dumps(measure(name, devices)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
