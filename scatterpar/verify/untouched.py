"""The user's code once more, without a trace: random state, buffers and attributes are put back."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.mirror import Snapshot, Survey
from scatterpar.torch_private import uncompiled

__all__ = ["Traces", "untouched"]


@dataclass
class Traces:
    """What had to be put back when the body was through.

    Attributes:
        random: a generator had moved: torch's, Python's or NumPy's.
        state: a tensor had been written, or an attribute rebound.
    """

    random: bool = False
    state: bool = False

    @property
    def any(self) -> bool:
        """Whether anything had to be put back."""
        return self.random or self.state


@contextlib.contextmanager
def untouched(
    roots: Sequence[nn.Module],
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    *,
    parameters: bool = False,
) -> Iterator[Traces]:
    """Put back, after the body, what it changed; and tell that it did.

    Args:
        roots: modules whose attributes and buffers the body may change.
        tensors: others that it may write.
        devices: those whose random numbers it may draw.
        parameters: put back parameters too; takes a copy of them.
    """
    survey = Survey(roots)
    snapshot = Snapshot(survey.containers)
    watched = [t for t in survey.tensors.values() if parameters or not isinstance(t, nn.Parameter)]
    kept = [(tensor, tensor.detach().clone()) for tensor in (*watched, *tensors)]
    generators = _generators(devices)
    before = [get() for get, _ in generators]
    traces = Traces()
    try:
        with uncompiled():  # for rows that come once
            yield traces
    finally:
        for tensor, value in kept:
            if not _same_bits(tensor.detach(), value):
                with torch.no_grad():
                    tensor.detach().copy_(value)
                traces.state = True
        if not snapshot.unchanged():
            snapshot.restore()
            traces.state = True
        for (get, put_back), state in zip(generators, before, strict=True):
            if not _same(get(), state):
                put_back(state)
                traces.random = True


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare all of it: batch normalisation writes statistics that torch counts no version of."""
    if one.shape != other.shape or one.layout != torch.strided:
        return one.shape == other.shape and torch.equal(one.to_dense(), other.to_dense())
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _generators(
    devices: Sequence[torch.device],
) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to get and set the state of each generator that code may draw from."""
    generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.default_generator.get_state, torch.default_generator.set_state),
        (random.getstate, random.setstate),
    ]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        generators.append(
            (
                lambda: pickle.dumps(numpy.get_state()),
                lambda state: numpy.set_state(pickle.loads(state)),
            )
        )
    for device in dict.fromkeys(device for device in devices if device.type != "cpu"):
        generators.append(_of_accelerator(device))
    return generators


def _of_accelerator(
    device: torch.device,
) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    module = torch.get_device_module(device)
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)
