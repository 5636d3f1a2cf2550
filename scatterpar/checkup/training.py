"""A step of a small network: whether its gradient is exact, and how long it takes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scatterpar.checkup.copies import synchronize
from scatterpar.devices.runtime import has_streams, physical
from scatterpar.engine import ScatterOnceParallel

ACCUM = 16
ENGINE, ONE, PER_CALL = "engine", "one device", f"nn.DataParallel x {ACCUM}"
BUDGET, ROUNDS = 10.0, 15  # maximal seconds and rounds of the measurement


def _network(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A transformer over the patches of an image, with the same weights every time."""
    with torch.random.fork_rng(devices=()):  # the caller's generator stays
        torch.default_generator.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        patches = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.GroupNorm(4, 32), nn.Flatten(2))
        head = nn.Sequential(nn.Flatten(), nn.Linear(2048, 10))
        network = nn.Sequential(patches, nn.TransformerEncoder(layer, 2), head)
    return network.to(physical(device), dtype)


def _batch(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Images and labels on the host, the same every time."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 32, 32, generator=generator, dtype=dtype)
    return images, torch.randint(10, (rows,), generator=generator)


@dataclass(frozen=True)
class Step:
    """The comparison of the engine's gradient with that of plain torch on one device, in words.

    ``warned`` has the texts of the engine's warnings.
    """

    is_exact: bool
    words: str
    warned: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'exact' if self.is_exact else 'WRONG'}: {self.words}"


def take_step(devices: Sequence[torch.device]) -> Step:
    """Compare one step on all devices with the same step on one device."""
    master, rows = physical(devices[0]), 8 * len(devices) + 3  # shares are ragged
    try:
        dtype = torch.zeros(1, dtype=torch.float64, device=master).dtype
    except (TypeError, RuntimeError):  # some accelerators do not have float64
        dtype = torch.float32
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ScatterOnceParallel(_network(master, dtype), 3, devices) as engine:
                check = engine.check(*_batch(rows, dtype), nn.CrossEntropyLoss())
    except Exception as error:
        return Step(False, f"a step failed: {type(error).__name__}: {error}")
    result = f"gradients of {rows} rows are {check.worst:.1e} apart at most ({check.parameter})"
    words = f"{result}, in {str(dtype).removeprefix('torch.')}"
    return Step(check.passed, words, tuple(str(warning.message) for warning in caught))


@dataclass
class Speed:
    """The seconds of a step in each round, by the program that computed it.

    All programs run in every round, so that a disturbance of the machine affects all of them. A GPU
    alone computes its part of the batch, the other programs all of it. ``phases`` has the median
    seconds of the engine's phases.
    """

    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def ratio(self, other: str) -> float:
        """The engine's time divided by another program's: the median over the rounds."""
        pairs = zip(self.seconds[ENGINE], self.seconds[other], strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    def __str__(self) -> str:
        lines = [f"a step of {self.rows} rows{f' failed: {self.error}' if self.error else ':'}"]
        lines += [f"  {n + ':':22} {1e3 * median(s):8.1f} ms" for n, s in self.seconds.items()]
        phases = ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in self.phases.items())
        return "\n".join([*lines, f"  in the engine: {phases}"] if phases else lines)


def measure(devices: Sequence[torch.device]) -> Speed:
    """Time a step of every program, in as many rounds as fit into ``BUDGET`` seconds."""
    size = 64 if all(map(has_streams, devices)) else 2  # rows of a sub-step
    speed = Speed(size * ACCUM * len(devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exact step has reported the engine's warnings
        try:
            _measure(speed, devices)
        except Exception as error:
            speed.error = f"{type(error).__name__}: {error}"
    return speed


def _measure(speed: Speed, devices: Sequence[torch.device]) -> None:
    images, labels = _batch(speed.rows)
    master, rows, module = devices[0], speed.rows // len(devices), _network(devices[0])
    phases: list[dict[str, float]] = []

    def step() -> None:
        module.zero_grad()
        engine.forward_backward(images, labels, nn.CrossEntropyLoss())
        assert engine.last_step is not None
        phases.append(engine.last_step.seconds)

    plain = _accumulation(_network(master), master, images, labels, len(devices) * ACCUM)
    steps = {ENGINE: step, ONE: plain}
    if 1 < len(set(devices)) == len(devices) and all(d.type != "cpu" for d in devices):
        for device in devices:
            part = images[:rows], labels[:rows]
            steps[f"{device} alone"] = _accumulation(_network(device), device, *part, ACCUM)
        parallel = nn.DataParallel(_network(master), [device.index for device in devices])
        per_call = _accumulation(parallel, master, images, labels, ACCUM)
        with contextlib.suppress(Exception):  # some accelerators do not support it
            per_call()
            steps[PER_CALL] = per_call
    with ScatterOnceParallel(module, ACCUM, devices) as engine:
        speed.seconds = _timed(steps, devices)
    speed.phases = {name: median(one[name] for one in phases[1:]) for name in phases[0]}


def _accumulation(
    module: nn.Module, device: torch.device, images: Tensor, labels: Tensor, parts: int
) -> Callable[[], None]:
    """A step by gradient accumulation in plain torch."""
    on_device = partial(Tensor.to, device=physical(device), non_blocking=True)

    def step() -> None:
        module.zero_grad()
        for inputs, targets in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            loss = cross_entropy(module(on_device(inputs)), on_device(targets))
            (loss / parts).backward()

    return step


def _timed(
    steps: dict[str, Callable[[], None]], devices: Sequence[torch.device]
) -> dict[str, list[float]]:
    """The seconds of each step in each round. A slow machine has fewer rounds."""
    times: dict[str, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    for count in range(1 + ROUNDS):
        if count > 1 and time.perf_counter() - begin > BUDGET:
            break
        for name, step in steps.items():
            synchronize(devices)
            start = time.perf_counter()
            step()
            synchronize(devices)
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}  # the first one warms up
