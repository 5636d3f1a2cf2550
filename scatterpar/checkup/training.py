"""A step of a small network: whether it is exact, and how long it takes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scatterpar.checkup.copies import settle
from scatterpar.devices.runtime import has_streams, physical
from scatterpar.engine import ScatterOnceParallel

ACCUM = 16
ENGINE, ONE, PER_CALL = "engine", "one device", f"nn.DataParallel x {ACCUM}"
BUDGET, ROUNDS = 10.0, 15  # at most, of seconds and of rounds


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
    """The engine's gradient beside that of plain torch on one device, in words.

    ``warned`` are the engine's warnings.
    """

    is_exact: bool
    words: str
    warned: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'exact' if self.is_exact else 'WRONG'}: {self.words}"


def take_step(devices: Sequence[torch.device]) -> Step:
    """One step on all devices, and the same on one, from the same weights."""
    here, rows = physical(devices[0]), 8 * len(devices) + 3  # shares are ragged
    try:
        dtype = torch.zeros(1, dtype=torch.float64, device=here).dtype
    except (TypeError, RuntimeError):  # some accelerators have none
        dtype = torch.float32
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ScatterOnceParallel(_network(here, dtype), 3, devices) as engine:
                found = engine.check(*_batch(rows, dtype), nn.CrossEntropyLoss())
    except Exception as error:
        return Step(False, f"a step failed: {type(error).__name__}: {error}")
    apart = f"gradients of {rows} rows are {found.worst:.1e} apart at most ({found.parameter})"
    words = f"{apart}, in {str(dtype).removeprefix('torch.')}"
    return Step(found.passed, words, tuple(str(warning.message) for warning in caught))


@dataclass
class Speed:
    """Seconds of a step of the same batch in each round, by who took it.

    All of them run in every round, so that whatever disturbs one disturbs all. A GPU alone takes
    its part of the batch. ``phases`` are the engine's medians.
    """

    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def ratio(self, other: str) -> float:
        """The engine's time over another's, the median of the rounds; below 1 is faster."""
        pairs = zip(self.seconds[ENGINE], self.seconds[other], strict=True)
        return median(mine / others for mine, others in pairs)

    def __str__(self) -> str:
        lines = [f"a step of {self.rows} rows{f' failed: {self.error}' if self.error else ':'}"]
        lines += [f"  {n + ':':22} {1e3 * median(s):8.1f} ms" for n, s in self.seconds.items()]
        phases = ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in self.phases.items())
        return "\n".join([*lines, f"  in the engine: {phases}"] if phases else lines)


def measure(devices: Sequence[torch.device]) -> Speed:
    """Some rounds of all who take the step, as many as fit into some seconds."""
    size = 64 if all(map(has_streams, devices)) else 2  # rows of a sub-step; 2 on processors
    speed = Speed(size * ACCUM * len(devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the engine warns of, the exact step has told
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
        with contextlib.suppress(Exception):  # some accelerators do not have what it needs
            per_call()
            steps[PER_CALL] = per_call
    with ScatterOnceParallel(module, ACCUM, devices) as engine:
        speed.seconds = _timed(steps, devices)
    speed.phases = {name: median(one[name] for one in phases[1:]) for name in phases[0]}


def _accumulation(
    module: nn.Module, device: torch.device, images: Tensor, labels: Tensor, parts: int
) -> Callable[[], None]:
    """A step by gradient accumulation, as one writes it by hand."""
    there = physical(device)

    def step() -> None:
        module.zero_grad()
        for some, wanted in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            out = module(some.to(there, non_blocking=True))
            loss = cross_entropy(out, wanted.to(there, non_blocking=True))
            (loss / parts).backward()

    return step


def _timed(
    steps: dict[str, Callable[[], None]], devices: Sequence[torch.device]
) -> dict[str, list[float]]:
    """Seconds of each step in each round; a slow machine gets fewer rounds, not an endless wait."""
    spent: dict[str, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    for count in range(1 + ROUNDS):
        if count > 1 and time.perf_counter() - begin > BUDGET:
            break
        for name, step in steps.items():
            settle(devices)
            start = time.perf_counter()
            step()
            settle(devices)
            spent[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in spent.items()}  # the first pays for beginning
