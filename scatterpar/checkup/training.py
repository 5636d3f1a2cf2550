"""A step of two small networks: whether it is exact, and how long it takes."""

from __future__ import annotations

import math
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
from scatterpar.devices.verbs import physical
from scatterpar.engine import ScatterOnceParallel

ACCUM = 16
ENGINE, ONE, PER_CALL = "engine", "one device", f"nn.DataParallel x {ACCUM}"
BUDGET = 6.0  # seconds for a network
_CLASSES, _WORDS, _LENGTH = 10, 512, 32
_ROWS, _MORE, _ACCUM = 8, 3, 3  # rows a replica, and some more, so that shares are ragged
_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3}
_FEWEST, _MOST = 3, 15  # rounds
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 2, 64  # of a sub-step that is timed


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, _CLASSES),
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(_WORDS, 64),
        nn.TransformerEncoder(layer, 2),
        nn.Flatten(),
        nn.Linear(64 * _LENGTH, _CLASSES),
    )


NETWORKS = {"small CNN": _cnn, "small transformer": _transformer}


def _module(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The network, with the same weights every time; the caller's generators stay."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        return NETWORKS[name]().to(physical(device), dtype)


def _batch(name: str, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and labels on the host, the same every time."""
    generator = torch.Generator().manual_seed(1)
    if NETWORKS[name] is _cnn:
        inputs = torch.randn(rows, 3, 32, 32, generator=generator).to(dtype)
    else:
        inputs = torch.randint(_WORDS, (rows, _LENGTH), generator=generator)
    return inputs, torch.randint(_CLASSES, (rows,), generator=generator)


@dataclass
class Step:
    """How far the engine's gradient lies from that of plain torch on one device.

    ``worst`` is the largest difference in one parameter's gradient, relative to its largest entry;
    rounding alone stays below ``limit``.
    """

    problem: str
    dtype: str
    rows: int
    worst: float = math.inf
    parameter: str = ""
    limit: float = 0.0
    warned: tuple[str, ...] = ()
    error: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether only rounding differs."""
        return self.error is None and self.worst <= self.limit

    def __str__(self) -> str:
        result = "exact" if self.is_exact else "WRONG"
        words = f"{result}, {self.worst:.1e} apart at most ({self.parameter})"
        words = words if self.error is None else f"failed: {self.error}"
        return f"{self.problem}, {self.rows} rows, {self.dtype}: {words}"


def take_step(name: str, devices: Sequence[torch.device]) -> Step:
    """One step on all devices, and the same on one, from the same weights."""
    dtype, rows = _widest(devices[0]), _ROWS * len(devices) + _MORE
    step = Step(name, str(dtype).removeprefix("torch."), rows, limit=_LIMITS[dtype])
    inputs, labels = _batch(name, rows, dtype)
    try:
        module, plain = (_module(name, devices[0], dtype) for _ in range(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ScatterOnceParallel(module, _ACCUM, devices) as engine:
                engine.forward_backward(inputs, labels, nn.CrossEntropyLoss())
        step.warned = tuple(str(warning.message) for warning in caught)
        here = physical(devices[0])
        cross_entropy(plain(inputs.to(here)), labels.to(here)).backward()
        pairs = zip(module.named_parameters(), plain.parameters(), strict=True)
        step.worst, step.parameter = max((_apart(one, other), n) for (n, one), other in pairs)
    except Exception as error:
        step.error = f"{type(error).__name__}: {error}"
    return step


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of two gradients, relative to the second's largest entry."""
    if one.grad is None or other.grad is None:
        return math.inf
    found, expected = one.grad.cpu().double(), other.grad.cpu().double()
    difference = float((found - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(difference) else difference


def _widest(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no other."""
    try:
        torch.zeros(1, dtype=torch.float64, device=physical(device))
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


@dataclass
class Speed:
    """Seconds of a step of the same batch, by who took it.

    All of them run in every round, so that whatever disturbs one disturbs all. ``paces`` are
    sub-steps per second of each device alone, ``phases`` the engine's medians, ``absent`` says why
    somebody took no part. On a busy machine nothing ``is_judged``: ratios would say little.
    """

    problem: str
    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    paces: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    is_judged: bool = True
    error: str | None = None

    def ratio(self, other: str) -> float | None:
        """The engine's time over another's, the median of the rounds; below 1 is faster."""
        if other not in self.seconds:
            return None
        pairs = zip(self.seconds[ENGINE], self.seconds[other], strict=True)
        return median(mine / others for mine, others in pairs)

    @property
    def moving(self) -> float:
        """The part of the engine's time in which parameters, gradients or the batch cross."""
        whole = sum(self.phases.values())
        return 1 - self.phases["compute"] / whole if whole else 0.0

    def __str__(self) -> str:
        lines = [f"{self.problem}, a step of {self.rows} rows:"]
        if self.error is not None:
            return f"{lines[0]}\n  failed: {self.error}"
        for name, seconds in self.seconds.items():
            more = f"  (the engine takes {self.ratio(name):.2f} of it)" if self.is_judged else ""
            if name == ENGINE:
                more = (
                    f"  ({', '.join(f'{p} {1e3 * spent:.1f}' for p, spent in self.phases.items())})"
                )
            lines.append(f"  {name + ':':22} {1e3 * median(seconds):8.1f} ms{more}")
        lines += [f"  {name + ':':22} not compared: {why}" for name, why in self.absent.items()]
        for name, paces in self.paces.items():
            lines.append(f"  {name + ' alone:':22} {median(paces):8.1f} sub-steps a second")
        return "\n".join(lines)


def measure(name: str, devices: Sequence[torch.device], *, is_judged: bool = True) -> Speed:
    """Some rounds of all who take the step, as many as fit into some seconds."""
    on_cpu = any(device.type == "cpu" for device in devices)
    size = _ROWS_ON_CPU if on_cpu else _ROWS_ELSEWHERE
    speed = Speed(name, size * ACCUM * len(devices), is_judged=is_judged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the engine warns of, the exact step has told
        try:
            _measure(speed, devices, on_cpu)
        except Exception as error:
            speed.error = f"{type(error).__name__}: {error}"
    return speed


def _measure(speed: Speed, devices: Sequence[torch.device], on_cpu: bool) -> None:
    inputs, labels = _batch(speed.problem, speed.rows)
    master, rows = devices[0], speed.rows // len(devices)
    module, alone = (_module(speed.problem, master) for _ in range(2))
    phases: list[dict[str, float]] = []

    def step() -> None:
        module.zero_grad()
        engine.forward_backward(inputs, labels, nn.CrossEntropyLoss())
        assert engine.last_step is not None
        phases.append(engine.last_step.seconds)

    steps = {ENGINE: step, ONE: _plain(alone, master, inputs, labels, len(devices) * ACCUM)}
    if on_cpu:
        speed.absent[PER_CALL] = "on the CPU torch calls the module itself"
    elif len(set(devices)) < max(len(devices), 2):
        speed.absent[PER_CALL] = "needs several cards, each of them once"
    else:
        parallel = nn.DataParallel(_module(speed.problem, master), [d.index for d in devices])
        per_call = _plain(parallel, master, inputs, labels, ACCUM)
        try:
            per_call()
            steps[PER_CALL] = per_call
        except Exception as error:  # some accelerators do not have what it needs
            speed.absent[PER_CALL] = f"did not run: {type(error).__name__}: {error}"
    different = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    for device in different if len(different) > 1 else ():
        replica = _module(speed.problem, device)
        steps[str(device)] = _plain(replica, device, inputs[:rows], labels[:rows], ACCUM)
    with ScatterOnceParallel(module, ACCUM, devices) as engine:
        spent = _rounds(steps, devices)
    speed.paces = {n: [ACCUM / s for s in spent.pop(n)] for n in map(str, different) if n in spent}
    speed.seconds = spent
    timed = phases[-len(spent[ENGINE]) :]
    speed.phases = {name: median(one[name] for one in timed) for name in timed[0]}


def _plain(
    module: nn.Module, device: torch.device, inputs: Tensor, labels: Tensor, parts: int
) -> Callable[[], None]:
    """A step by gradient accumulation, as one writes it by hand."""
    there = physical(device)
    pieces = list(zip(inputs.chunk(parts), labels.chunk(parts), strict=True))

    def step() -> None:
        module.zero_grad()
        for piece, wanted in pieces:
            out = module(piece.to(there, non_blocking=True))
            loss = cross_entropy(out, wanted.to(there, non_blocking=True))
            (loss / parts).backward()

    return step


def _rounds(
    steps: dict[str, Callable[[], None]], devices: Sequence[torch.device]
) -> dict[str, list[float]]:
    """Seconds of each step in each round; a slow machine gets fewer rounds, not an endless wait."""
    spent: dict[str, list[float]] = defaultdict(list)
    begin, rounds = time.perf_counter(), 0
    while rounds <= _MOST:
        budget = BUDGET if rounds > _FEWEST else 2 * BUDGET
        if rounds and time.perf_counter() - begin >= budget:
            break
        for name, step in steps.items():
            settle(devices)
            start = time.perf_counter()
            step()
            settle(devices)
            spent[name].append(time.perf_counter() - start)
        rounds += 1
    # The first round pays for what is done only once.
    return {name: seconds[1:] or seconds for name, seconds in spent.items()}
