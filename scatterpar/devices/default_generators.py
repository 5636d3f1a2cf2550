"""The default random generators of devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.virtual_devices import HOST


class AcceleratorGenerator:
    """The default generator of an accelerator.

    torch has functions of a device in its place, with which a capture of a CUDA graph
    and devices of other makers work, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)

    def get_state(self) -> Tensor:
        """A copy of the state, in host memory."""
        state: Tensor = self._backend.get_rng_state(self._device)
        return state

    def set_state(self, state: Tensor) -> None:
        """Write a state that ``get_state`` returned."""
        self._backend.set_rng_state(state, device=self._device)


def default_of(device: torch.device) -> torch.Generator | AcceleratorGenerator:
    """The device's default generator."""
    if device == HOST:
        return torch.default_generator
    return AcceleratorGenerator(device)
