"""Checks of time: steps compared with DDP's, launches, and copies that overlap with kernels."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from scatterpar import ScatterOnceParallel
from scatterpar.checkup.card.networks import Network, network
from scatterpar.checkup.card.ranks import Ranks
from scatterpar.checkup.card.setting import Finding, Setting

COUNTS = (1, 2, 4, 8)
EAGER, GRAPHS, DDP = "eager", "graphs", "DDP"
_ACCUM, _ROUNDS = 16, 3
_Times = dict[str, list[float]]  # the seconds of a step in each round, by contender


def join(setting: Setting) -> Finding:
    """Start the processes of DistributedDataParallel, with which the other checks compare."""
    _processes(setting)
    return Finding(True, f"{len(setting.devices)} processes")


def step(name: str, count: int, mode: str, setting: Setting) -> Finding:
    """A step's time relative to DDP's, and each GPU's throughput relative to that of one alone."""
    full, _ = measured(name, count, setting)
    ratio = median(ours / theirs for ours, theirs in zip(full[mode], full[DDP], strict=True))
    alone, _ = measured(name, 1, setting)
    efficiency = median(alone[mode]) / median(full[mode])
    words = f"{1e3 * median(full[mode]):.0f} ms, DDP {1e3 * median(full[DDP]):.0f} ms: {ratio:.2f}"
    return Finding(ratio <= 1.1 and efficiency >= 0.9, f"{words}; efficiency {efficiency:.2f}")


def host(name: str, mode: str, setting: Setting) -> Finding:
    """The host's time to launch a sub-step on all GPUs, beside the GPUs' time to compute it."""
    count = max(count for count in COUNTS if count <= len(setting.devices))
    full, tiny = measured(name, count, setting)
    launching, computing = (1e3 * median(each[mode]) / _ACCUM for each in (tiny, full))
    words = f"{launching:.2f} ms for {count} GPUs, a sub-step {computing:.2f} ms"
    return Finding(launching <= computing, words)


@functools.cache
def measured(name: str, count: int, setting: Setting) -> tuple[_Times, _Times]:
    """The step times of all contenders in turn: full batches, and ones that compute nothing."""
    net, devices = network(name, setting), setting.devices[:count]
    processes = _processes(setting)
    full, tiny = (_batch(net, count, is_tiny) for is_tiny in (False, True))
    times: tuple[_Times, _Times] = ({}, {})
    with contextlib.ExitStack() as engines:
        steps: dict[str, Callable[[bool], float]] = {
            DDP: lambda is_tiny: max(
                processes.ask(_ddp_step, name, count, is_tiny, setting, first=count)
            )
        }
        for mode in (EAGER, GRAPHS):
            module = net.module(devices[0])
            engine = ScatterOnceParallel(module, _ACCUM, devices, graphs=mode == GRAPHS)
            engines.enter_context(engine)

            def take(is_tiny: bool, engine: Any = engine) -> float:
                engine.module.zero_grad()
                batch = tiny if is_tiny else full
                work = functools.partial(engine.forward_backward, *batch, net.criterion)
                return timed(work, devices)

            steps[mode] = take
        for number in range(1 + _ROUNDS):
            for mode, take_step in steps.items():
                for is_tiny in (False, True):
                    seconds = take_step(is_tiny)
                    if number:  # the first round is a warm-up
                        times[is_tiny].setdefault(mode, []).append(seconds)
    return times


def _batch(net: Network, count: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    rows = 2 if is_tiny else net.rows
    inputs, targets = net.batch(rows * _ACCUM * count, 0, is_tiny)
    return inputs.pin_memory(), targets.pin_memory()


def timed(work: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """The seconds until the devices have done ``work``."""
    for device in devices:
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    work()
    for device in devices:
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


@functools.cache
def _processes(setting: Setting) -> Ranks:
    """A process for each GPU, until this process ends."""
    ranks = Ranks(setting.devices)
    ranks.ask(_join_groups, len(setting.devices))
    return ranks


_groups: dict[int, Any] = {}  # in one of the processes


def _join_groups(rank: int, world: int) -> None:
    """Make a group of the first processes for each number of GPUs."""
    _groups.update({count: dist.new_group(range(count)) for count in COUNTS if count <= world})


def _ddp_step(rank: int, name: str, count: int, is_tiny: bool, setting: Setting) -> float:
    """The seconds of one process's step: ``no_sync`` for all sub-steps except the last."""
    net, module, batches = _contender(rank, name, count, setting)
    device, (inputs, targets) = setting.devices[rank], batches[is_tiny]
    pieces = list(zip(inputs.chunk(_ACCUM), targets.chunk(_ACCUM), strict=True))

    def work() -> None:
        for number, (x, y) in enumerate(pieces, 1):
            is_quiet = number < _ACCUM and isinstance(module, DistributedDataParallel)
            with module.no_sync() if is_quiet else contextlib.nullcontext():
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                (net.criterion(module(x), y) / _ACCUM).backward()

    module.zero_grad()
    dist.barrier(_groups[count])
    return timed(work, [device])


@functools.lru_cache(maxsize=1)
def _contender(rank: int, name: str, count: int, setting: Setting) -> tuple[Network, Any, Any]:
    net, device = network(name, setting), setting.devices[rank]
    module: Any = net.module(device)
    if count > 1:
        module = DistributedDataParallel(module, [device.index], process_group=_groups[count])
    return net, module, [_batch(net, 1, is_tiny) for is_tiny in (False, True)]


def arrival(pinned: bool, setting: Setting) -> Finding:
    """The part of the time of copies to the first GPU during which it computes."""
    net, device = network("ResNet-50", setting), setting.devices[0]
    inputs, targets = net.batch(net.rows * _ACCUM, 0, False)
    if pinned:
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    module = net.module(device)
    with (
        ScatterOnceParallel(module, _ACCUM, [device]) as engine,
        tempfile.TemporaryDirectory() as at,
    ):
        for _ in range(2):
            engine.forward_backward(inputs, targets, net.criterion)
        with torch.profiler.profile(acc_events=True) as profile:
            engine.forward_backward(inputs, targets, net.criterion)
            torch.accelerator.synchronize(device)
        file = Path(at) / "trace.json"
        profile.export_chrome_trace(str(file))
        hidden, total = under_kernels(json.loads(file.read_text())["traceEvents"])
    if not total:
        return Finding(False, "the profiler saw no copies to the GPU")
    words = f"{hidden / total:.1%} of {total / 1e3:.1f} ms"
    return Finding(hidden / total >= (0.9 if pinned else 0.7), words)


def under_kernels(events: Sequence[Any]) -> tuple[float, float]:
    """The microseconds of copies from the host during which kernels run, and all of them."""
    spans = [(e["ts"], e["ts"] + e["dur"], e["cat"], e["name"]) for e in events if "dur" in e]
    kernels = _union([(start, end) for start, end, kind, _ in spans if kind == "kernel"])
    copies = _union([(a, b) for a, b, kind, name in spans if "HtoD" in name and "gpu" in kind])
    total = _length(copies)
    return _length(kernels) + total - _length(_union(kernels + copies)), total


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
