"""Proof on the spot: the engine's gradients against a plain whole-batch backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.engine import ScatterOnceParallel
from scatterpar.train.machines import Machines

TOLERANCE = 1e-10
_SMALLEST_SCALE = 1e-6


@dataclass(frozen=True)
class Check:
    """The outcome: the largest relative difference, where it is, and for how many images."""

    rows: int
    difference: float
    parameter: str

    @property
    def passed(self) -> bool:
        """Whether only rounding differs."""
        return self.difference <= TOLERANCE

    def __str__(self) -> str:
        verdict = "exact" if self.passed else "NOT EXACT"
        return (
            f"check: gradients of the first step's {self.rows:,} images against a plain "
            "whole-batch backward on one device\n"
            "       (both in float64 and in evaluation mode, where batch normalisation and dropout "
            "treat rows alone)\n"
            f"       largest relative difference {self.difference:.2e}, in {self.parameter}: "
            f"{verdict} (limit {TOLERANCE:.0e})"
        )


def check_gradients(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    criterion: nn.Module,
    accum: int,
    micro_batch_size: int | None,
    devices: Sequence[torch.device],
    machines: Machines | None = None,
) -> Check:
    """Compare the engine's gradients of one batch with those of a plain `backward()`.

    Works on copies: the model and its gradients stay as they are. Evaluation mode, because in
    training mode batch normalisation ties the rows of a micro-batch together, and then there is
    no whole-batch gradient that micro-batches could give.

    On several machines the engine gets a part of the batch on each, and every machine compares
    with the whole of it.

    Args:
        model: on `devices[0]`.
        images: the whole batch, on the host, floating point.
        labels: the targets, on the host.
        criterion: the loss.
        accum: as in `ScatterOnceParallel`.
        micro_batch_size: as in `ScatterOnceParallel`.
        devices: as in `ScatterOnceParallel`.
        machines: the ranks of the run; by default this process alone.
    """
    machines = Machines() if machines is None else machines
    reference = copy.deepcopy(model).double().eval()
    twin = copy.deepcopy(reference)
    home = next(reference.parameters()).device
    reference.zero_grad()
    criterion(reference(images.double().to(home)), labels.to(home)).backward()
    twin.zero_grad()
    mine = machines.share(torch.arange(len(images)))
    with make_engine(twin, accum, micro_batch_size, devices, machines) as engine:
        engine.forward_backward(images[mine].double(), labels[mine], criterion)
    difference, parameter = largest_difference(twin, reference)
    return Check(len(images), difference, parameter)


def make_engine(
    model: nn.Module,
    accum: int,
    micro_batch_size: int | None,
    devices: Sequence[torch.device],
    machines: Machines,
    **keywords: Any,
) -> ScatterOnceParallel:
    """Build the engine that trains, with losses that must be finite."""
    return ScatterOnceParallel(
        model,
        accum=accum,
        device_ids=list(devices),
        micro_batch_size=micro_batch_size,
        check_finite=True,
        process_group=machines.group,
        **keywords,
    )


def largest_difference(found: nn.Module, expected: nn.Module) -> tuple[float, str]:
    """Compute the largest relative difference between two modules' gradients, and its place.

    For each parameter: the largest absolute difference over the largest absolute expected
    entry, or, for gradients that are nothing but rounding, over a millionth of the largest
    entry of all. A gradient that only one of the two has, or that is NaN, is an infinite
    difference.
    """
    theirs = dict(expected.named_parameters())
    entries = [_magnitude(parameter.grad) for parameter in theirs.values()]
    floor = _SMALLEST_SCALE * max(entries)
    worst, place = 0.0, next(iter(theirs))
    for name, parameter in found.named_parameters():
        a, b = parameter.grad, theirs[name].grad
        if a is None or b is None:
            difference = 0.0 if a is b else math.inf
        else:
            difference = _relative(_magnitude(a - b), max(_magnitude(b), floor))
        if difference > worst:
            worst, place = difference, name
    return worst, place


def _relative(difference: float, scale: float) -> float:
    if math.isnan(difference):
        return math.inf
    return difference / scale if difference else 0.0


def _magnitude(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.abs().max().item()
