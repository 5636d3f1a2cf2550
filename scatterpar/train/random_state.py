"""All random generators of a process: torch's, Python's, NumPy's and those of the devices."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def seed_host(seed: int) -> None:
    """Seed every generator of the host that a model or a transform may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def random_states(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The states of all generators, the CPU's and those of devices, as plain values and tensors."""
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


def seed_of(*numbers: int) -> int:
    """Make one seed of several numbers, of 32 bits: torch's CPU generator ignores higher ones."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(32)


@contextlib.contextmanager
def drawing_from() -> Iterator[Callable[[int], None]]:
    """Yield what seeds the host's generators, which are put back afterwards."""
    before = random_states()
    try:
        yield seed_host
    finally:
        set_random_states(before)
