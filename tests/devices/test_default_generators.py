"""The default generators of the host, and of a device that torch has a module for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scatterpar.devices.default_generators import default_of

pytestmark = pytest.mark.core


def test_host_has_torchs_generator():
    assert default_of(torch.device("cpu")) is torch.default_generator


def test_accelerator_asked_for_its_own_state(monkeypatch):
    """torch's functions of a device are called with that device."""
    states = {
        torch.device("meta", 0): torch.zeros(1),
        torch.device("meta", 1): torch.ones(1),
    }

    def set_rng_state(state, device):
        states[device] = state

    backend = SimpleNamespace(get_rng_state=states.get, set_rng_state=set_rng_state)
    monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
    generator = default_of(torch.device("meta", 1))
    assert generator.get_state().item() == 1
    generator.set_state(torch.full((1,), 7))
    assert [state.item() for state in states.values()] == [0, 7]
