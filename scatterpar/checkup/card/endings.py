"""How failing steps end on all devices. Each scenario runs in a process of its own.

``python -m scatterpar.checkup.card.endings SCENARIO DEVICE …`` runs one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scatterpar import ScatterOnceParallel
from scatterpar.checkup.card.setting import Finding, Setting

_SECONDS = 10.0  # a process must end within this time


def ends(scenario: str, words: str, setting: Setting) -> Finding:
    """Whether a process prints ``words`` and ends in time after it has printed "ready"."""
    names = map(str, setting.devices)
    module = "scatterpar.checkup.card.endings"
    with setting.start(module, scenario, *names) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:  # if nothing comes, the limit of the check ends it
            said.append(line.strip())
            if line.startswith("ready"):
                break
        start = time.monotonic()
        if scenario == "interrupt":
            process.send_signal(signal.SIGINT)
        said += [line.strip() for line in process.stdout if line.strip()]
        process.wait()
        seconds = time.monotonic() - start
    found = next((line for line in said if words in line), None)
    if found is None:
        last = said[-1][:200] if said else "nothing"
        return Finding(False, f"code {process.returncode}, its last words: {last}")
    return Finding(seconds <= setting.limit(_SECONDS), f"{found[:200]}: ended in {seconds:.1f} s")


def sanitized(setting: Setting) -> Finding:
    """Steps on the first GPU under torch's own race checker, which supports one thread only."""
    module, device = "scatterpar.checkup.card.endings", str(setting.devices[0])
    with setting.start(module, "steps", device, TORCH_CUDA_SANITIZER="1") as process:
        assert process.stdout is not None
        said = process.stdout.read()
    races = said.count("CSAN detected a possible data race")
    passed = process.returncode == 0 and not races
    return Finding(passed, f"{races} races, code {process.returncode}; {_last_line(said)}")


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


class _Net(nn.Module):
    """An embedding and a layer. A forward pass also allocates ``bytes`` for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(8, 64), nn.Linear(64, 4)
        self.bytes = 0

    def forward(self, words: Tensor) -> Tensor:
        """Four logits for each row."""
        taken = torch.empty(self.bytes * len(words), dtype=torch.uint8, device=words.device)
        logits: Tensor = self.last(self.words(words).mean(1))
        del taken
        return logits


def memory(devices: Sequence[torch.device]) -> None:
    """All devices run out of memory; then ``accum="auto"`` finds sub-steps that fit."""
    total = min(torch.cuda.get_device_properties(device).total_memory for device in devices)
    net, batch = _problem(devices)
    with ScatterOnceParallel(net, 1, devices) as engine:
        engine.forward_backward(*batch, cross_entropy)
        net.bytes = total // 4
        print("ready", flush=True)
        try:
            engine.forward_backward(*batch, cross_entropy)
        except torch.OutOfMemoryError:
            print("OutOfMemoryError", flush=True)
    accum: Any = "auto"
    gradients = []
    for _ in range(2):  # the second time with the number of sub-steps that the first has found
        net.zero_grad()
        with ScatterOnceParallel(net, accum, devices) as engine:
            engine.forward_backward(*batch, cross_entropy)
            assert engine.last_step is not None
            accum = len(engine.last_step.plan.shares[0].micro_batches)
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    same = all(map(torch.equal, *gradients))
    print(f'accum="auto" {"has" if same else "differs from"} the bits of {accum} sub-steps')


def assertion(devices: Sequence[torch.device]) -> None:
    """The last device's kernel meets an index that is out of range."""
    net, (words, targets) = _problem(devices)
    with ScatterOnceParallel(net, 4, devices, verify=False) as engine:
        engine.forward_backward(words, targets, cross_entropy)
        words[-1, -1] = 10**6
        print("ready", flush=True)
        try:
            engine.forward_backward(words, targets, cross_entropy)
        except RuntimeError as error:
            print(f"{type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


def interrupt(devices: Sequence[torch.device]) -> None:
    """Ctrl-C arrives while all devices compute."""
    net, batch = _problem(devices)
    with ScatterOnceParallel(net, 4, devices) as engine:
        engine.forward_backward(*batch, cross_entropy)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup's jobs may ignore it
        with contextlib.suppress(KeyboardInterrupt):
            print("ready", flush=True)
            while True:
                engine.forward_backward(*batch, cross_entropy)
        print("KeyboardInterrupt", flush=True)
        engine.forward_backward(*batch, cross_entropy)


def steps(devices: Sequence[torch.device]) -> None:
    """Some steps, with a pinned batch."""
    net, batch = _problem(devices)
    words, targets = (tensor.pin_memory() for tensor in batch)
    with ScatterOnceParallel(net, 4, devices) as engine:
        for _ in range(3):
            engine.forward_backward(words, targets, cross_entropy)
    print("3 steps", flush=True)


def _problem(devices: Sequence[torch.device]) -> tuple[_Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    rows = 8 * len(devices)
    words, targets = torch.arange(4 * rows).view(rows, 4) % 8, torch.arange(rows) % 4
    return _Net().to(devices[0].type if devices[0].type == "cpu" else devices[0]), (words, targets)


if __name__ == "__main__":
    scenarios = {work.__name__: work for work in (memory, assertion, interrupt, steps)}
    scenarios[sys.argv[1]]([torch.device(name) for name in sys.argv[2:]])
    os._exit(0)  # after an assertion nothing can be freed
