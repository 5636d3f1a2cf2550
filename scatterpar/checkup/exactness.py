"""One step on all devices against the same step on one, parameter by parameter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from scatterpar.checkup.problems import Problem
from scatterpar.devices.verbs import physical
from scatterpar.engine import ScatterOnceParallel

__all__ = ["Step", "examine"]

_ROWS, _MORE, _ACCUM = 8, 3, 3  # rows a replica, and some more, so that shares are ragged
_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3}


@dataclass(frozen=True)
class Step:
    """How far the engine's gradient lies from that of plain torch on one device.

    Attributes:
        problem: what was trained.
        dtype: in what.
        rows: in the batch.
        worst: the largest difference in one parameter's gradient, relative to its largest entry.
        parameter: which one that is.
        limit: rounding alone stays below this.
        warned: what the engine warned of.
        error: what went wrong instead.
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


def examine(problem: Problem, devices: Sequence[torch.device]) -> Step:
    """One step of each kind, from the same weights."""
    dtype = _widest(devices[0])
    rows = _ROWS * len(devices) + _MORE
    said: tuple[str, ...] = ()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _gradients_of_all(problem, devices, rows, dtype)
        said = tuple(str(warning.message) for warning in caught)
        expected = _gradients_of_one(problem, devices[0], rows, dtype)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return Step(problem.name, str(dtype), rows, warned=said, error=words)
    differences = {name: _difference(found[name], expected[name]) for name in expected}
    worst = max(differences, key=lambda name: differences[name])
    return Step(
        problem.name, str(dtype), rows, differences[worst], worst, _LIMITS[dtype], warned=said
    )


def _gradients_of_all(
    problem: Problem, devices: Sequence[torch.device], rows: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    module = problem.module(devices[0], dtype)
    with ScatterOnceParallel(module, _ACCUM, devices) as engine:
        engine.forward_backward(*problem.batch(rows, dtype), nn.CrossEntropyLoss())
    return _gradients(module)


def _gradients_of_one(
    problem: Problem, device: torch.device, rows: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    module = problem.module(device, dtype)
    inputs, labels = (tensor.to(physical(device)) for tensor in problem.batch(rows, dtype))
    nn.functional.cross_entropy(module(inputs), labels).backward()
    return _gradients(module)


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter's gradient, on the host; nothing, as zero would be, where there is none."""
    return {
        name: torch.tensor(math.nan) if p.grad is None else p.grad.cpu().double()
        for name, p in module.named_parameters()
    }


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = float((found - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(difference) else difference


def _widest(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no other."""
    try:
        torch.zeros(1, dtype=torch.float64, device=physical(device))
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
