"""All random generators of a process: torch's, Python's, NumPy's and those of the devices."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    _seed_host(seed)


def _seed_host(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def random_states(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of all generators, as plain values and tensors.

    Args:
        devices: those whose generators belong to the run; the CPU's always does.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.tensor(keys.tolist()), *rest)
    states["devices"] = {
        str(device): torch.get_device_module(device).get_rng_state(device)
        for device in devices
        if device.type != "cpu"
    }
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` returned, as far as the devices are there."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *rest))
    for name, state in states["devices"].items():
        device = torch.device(name)
        module = torch.get_device_module(device) if torch.accelerator.is_available() else None
        if module is not None and (device.index or 0) < module.device_count():
            module.set_rng_state(state, device)


def seed_of(seed: int, epoch: int, number: int) -> int:
    """Make one seed of three numbers, of 32 bits: torch's CPU generator ignores higher ones."""
    return random.Random(f"{seed} {epoch} {number}").getrandbits(32)


@contextlib.contextmanager
def drawing_from() -> Iterator[Callable[[int], None]]:
    """Yield what seeds the host's generators, which are put back afterwards."""
    before = random_states()
    try:
        yield _seed_host
    finally:
        set_random_states(before)
