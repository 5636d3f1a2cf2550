"""How long a step takes: the engine, ``nn.DataParallel`` for every sub-step, one device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from scatterpar.checkup.copies import settle
from scatterpar.checkup.problems import Problem
from scatterpar.devices.verbs import physical
from scatterpar.engine import ScatterOnceParallel

__all__ = ["ACCUM", "ENGINE", "ONE", "PER_CALL", "Speed", "examine"]

ACCUM = 16
ENGINE, ONE, PER_CALL = "engine", "one device", f"nn.DataParallel x {ACCUM}"
BUDGET = 6.0  # seconds for a problem
_FEWEST, _MOST = 3, 15  # rounds
_ROWS_ON_CPU, _ROWS = 2, 64  # of a sub-step

Contenders = dict[str, Callable[[], object]]


@dataclass
class Speed:
    """Seconds of a step of the same batch, by who took it.

    All of them run in every round, so that whatever disturbs one disturbs all.

    Attributes:
        problem: what was trained.
        rows: in the batch.
        seconds: of each round, by contender.
        paces: sub-steps per second of each device alone, by round.
        phases: the engine's seconds by phase, the median of the rounds.
        absent: who took no part, and why.
        error: what went wrong.
    """

    problem: str
    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    paces: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def ratio(self, other: str) -> float | None:
        """The engine's time over another's, the median of the rounds; below 1 is faster."""
        if other not in self.seconds or ENGINE not in self.seconds:
            return None
        pairs = zip(self.seconds[ENGINE], self.seconds[other], strict=True)
        return median(mine / others for mine, others in pairs)

    @property
    def moving(self) -> float:
        """The part of the engine's time in which parameters, gradients or the batch cross."""
        whole = sum(self.phases.values())
        return 1 - self.phases["compute"] / whole if whole else 0.0


def examine(problem: Problem, devices: Sequence[torch.device]) -> Speed:
    """Some rounds of every contender, as many as fit into some seconds."""
    size = _ROWS_ON_CPU if any(device.type == "cpu" for device in devices) else _ROWS
    speed = Speed(problem.name, size * ACCUM * len(devices))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the engine warns of, the exact step has told
            _measure(problem, devices, speed)
    except Exception as error:
        speed.error = f"{type(error).__name__}: {error}"
    return speed


def _measure(problem: Problem, devices: Sequence[torch.device], speed: Speed) -> None:
    inputs, labels = problem.batch(speed.rows)
    parts = len(devices) * ACCUM
    module = problem.module(devices[0])
    with ScatterOnceParallel(module, ACCUM, devices) as engine:
        phases: list[dict[str, float]] = []

        def step() -> None:
            module.zero_grad()
            engine.forward_backward(inputs, labels, nn.CrossEntropyLoss())
            assert engine.last_step is not None
            phases.append(engine.last_step.seconds)

        contenders: Contenders = {ENGINE: step}
        if why := _why_not_per_call(devices):
            speed.absent[PER_CALL] = why
        else:
            parallel = nn.DataParallel(problem.module(devices[0]), [d.index for d in devices])
            contenders[PER_CALL] = _plain(parallel, devices[0], inputs, labels, ACCUM)
        alone = problem.module(devices[0])
        contenders[ONE] = _plain(alone, devices[0], inputs, labels, parts)
        paces = _paces(problem, devices, inputs, labels)
        _drop_what_does_not_run(contenders, speed)
        _rounds(contenders, paces, devices, speed)
    timed = phases[-len(speed.seconds[ENGINE]) :]
    speed.phases = {name: median(one[name] for one in timed) for name in timed[0]}


def _why_not_per_call(devices: Sequence[torch.device]) -> str:
    if any(device.type == "cpu" for device in devices):
        return "runs on accelerators alone; on the CPU torch calls the module itself"
    if len(set(devices)) < max(len(devices), 2):
        return "needs several cards, each of them once"
    return ""


def _plain(
    module: nn.Module, device: torch.device, inputs: Tensor, labels: Tensor, parts: int
) -> Callable[[], object]:
    """A step by gradient accumulation, as one writes it by hand."""
    there = physical(device)
    pieces = list(zip(inputs.chunk(parts), labels.chunk(parts), strict=True))

    def step() -> None:
        module.zero_grad()
        for piece, wanted in pieces:
            out = module(piece.to(there, non_blocking=True))
            loss = nn.functional.cross_entropy(out, wanted.to(there, non_blocking=True))
            (loss / parts).backward()

    return step


def _paces(
    problem: Problem, devices: Sequence[torch.device], inputs: Tensor, labels: Tensor
) -> Contenders:
    """One replica's part of the step on each device alone; CPU replicas share the same cores."""
    different = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    if len(different) < 2:
        return {}
    rows = len(inputs) // len(devices)
    return {
        str(device): _plain(problem.module(device), device, inputs[:rows], labels[:rows], ACCUM)
        for device in different
    }


def _drop_what_does_not_run(contenders: Contenders, speed: Speed) -> None:
    """Only ``nn.DataParallel`` may fail: some accelerators do not have what it needs."""
    if PER_CALL in contenders:
        try:
            contenders[PER_CALL]()
        except Exception as error:
            del contenders[PER_CALL]
            speed.absent[PER_CALL] = f"did not run: {type(error).__name__}: {error}"


def _rounds(
    contenders: Contenders, paces: Contenders, devices: Sequence[torch.device], speed: Speed
) -> None:
    start, rounds = time.perf_counter(), 0
    while _goes_on(rounds, time.perf_counter() - start):
        for name, step in [*contenders.items(), *paces.items()]:
            spent = _timed(step, devices)
            if name in paces:
                speed.paces.setdefault(name, []).append(ACCUM / spent)
            else:
                speed.seconds.setdefault(name, []).append(spent)
        rounds += 1
    if rounds > 1:  # the first one pays for what is done only once
        for found in [*speed.seconds.values(), *speed.paces.values()]:
            del found[0]


def _goes_on(rounds: int, seconds: float) -> bool:
    """A slow machine gets fewer rounds, not an endless wait; the first one alone in the end."""
    if not rounds:
        return True
    return rounds <= _MOST and seconds < (BUDGET if rounds > _FEWEST else 2 * BUDGET)


def _timed(step: Callable[[], object], devices: Sequence[torch.device]) -> float:
    settle(devices)
    start = time.perf_counter()
    step()
    settle(devices)
    return time.perf_counter() - start
