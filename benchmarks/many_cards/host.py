"""How long is the host at work in a step, apart from what the cards would do?

``python -m benchmarks.many_cards.host resnet101 4`` (see ``process.py``) prints seconds
of CPU time, by step and by who takes them: the phases of the caller's thread, and the
replicas' threads together. The time that the simulated accelerator takes itself is left
out, and so are forward and backward passes. The model is thin: as many tensors as the
real one has, and small ones, so that its kernels leave the processor's caches alone.
"""

import gc
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from simulated import NAME, control
from torch import Tensor, nn

from benchmarks.many_cards import process
from benchmarks.many_cards.count import Bare, gpt2, small
from scatterpar import ScatterOnceParallel
from scatterpar.step import attempt


def thin_gpt2() -> nn.Module:
    """As many tensors as GPT-2 small has, and small ones."""
    return gpt2(width=8, words=64, positions=16)


MODELS = {
    "resnet101": (small, torch.float32),
    "gpt2": (thin_gpt2, torch.bfloat16),
}
STEPS = ("first", "later", "kept")  # as in ``count.py``
_REPEATS = 9


class Watch:
    """The host's time outside of the caller's thread.

    Attributes:
        workers: seconds of the replicas' threads, without forward and backward passes.
        handing_over: seconds of autograd's threads while the caller's waits for a
            backward pass.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caller = threading.get_ident()
        self._since = threading.local()  # the end of a thread's last pass
        self._run_backward = torch.autograd.graph._engine_run_backward
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.workers = 0.0
        self.handing_over = 0.0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Leave out the body: a forward or backward pass in a replica's thread."""
        now, _ = control.host_seconds()
        with self._lock:
            self.workers += now - getattr(self._since, "seconds", 0.0)
        yield
        self._since.seconds, _ = control.host_seconds()

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        """Autograd's backward pass, of a worker's sub-step or the caller's commit."""
        if threading.get_ident() != self._caller:
            with self.passing():
                return self._run_backward(*arguments, **options)
        begin_of_thread, begin_of_all = control.host_seconds()
        gradients = self._run_backward(*arguments, **options)
        end_of_thread, end_of_all = control.host_seconds()
        of_all_threads = end_of_all - begin_of_all
        self.handing_over += of_all_threads - (end_of_thread - begin_of_thread)
        return gradients


class Watched(nn.Module):
    """A module whose forward passes are left out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: Tensor) -> Tensor:
        """The module's own output."""
        with WATCH.passing():
            return self.module(rows)


WATCH = Watch()


def measure(name: str, devices: int) -> dict[str, dict[str, float]]:
    """Seconds by step and by who takes them: medians, except of the first step."""
    build, dtype = MODELS[name]
    model = Watched(Bare(build().to(dtype))).to(f"{NAME}:0")
    rows = torch.ones(devices, 1, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    times: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        for number in range(_REPEATS):
            for step in STEPS if number == 0 else STEPS[1:]:
                if step != "kept":
                    optimizer.zero_grad()
                times[step].append(_measured(engine, rows))
                optimizer.step()
    return {step: _medians(of_step) for step, of_step in times.items()}


def _medians(times: list[dict[str, float]]) -> dict[str, float]:
    medians = {}
    for part in times[0]:
        medians[part] = statistics.median(seconds[part] for seconds in times)
    return medians


def _measured(engine: ScatterOnceParallel, rows: Tensor) -> dict[str, float]:
    """Take a step. Returns its seconds by who takes them."""
    for index in range(len(engine.device_ids)):
        torch.accelerator.synchronize(index)
    gc.collect()
    WATCH.reset()
    begin, _ = control.host_seconds()
    engine.forward_backward(rows)
    end, _ = control.host_seconds()
    caller = end - begin + WATCH.handing_over
    report = engine.last_step
    assert report is not None
    return {
        **report.seconds,
        "commit": caller - sum(report.seconds.values()),  # no phase of the report
        "caller": caller,
        "workers": WATCH.workers,
    }


def _import_what_steps_need() -> None:
    """Torch and the engine import some things when they are first used."""
    model = Watched(nn.Linear(1, 1)).to(f"{NAME}:0")
    with ScatterOnceParallel(model, 1, [0, 1], verify=False) as engine:
        for _ in range(2):
            engine.forward_backward(torch.ones(2, 1), None, _total)


def _total(output: Tensor, _: None) -> Tensor:
    return output.sum()


def _thread_seconds() -> float:
    seconds, _ = control.host_seconds()
    return seconds


def measure_in_host_time(name: str, devices: int) -> dict[str, dict[str, float]]:
    """``measure``, without the collector of garbage, on the clock of the host's work."""
    gc.disable()
    # The engine's phases are in the host's time.
    phases = SimpleNamespace(perf_counter=_thread_seconds)
    run_backward = WATCH.run_backward
    with (
        # ``Tensor.backward`` and the engine call the same function by two names.
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", run_backward),
        mock.patch.object(attempt, "time", phases),
    ):
        _import_what_steps_need()
        return measure(name, devices)


if __name__ == "__main__":
    process.main(measure_in_host_time)
