"""How long a thread launches, and its device works."""

from __future__ import annotations

import time

import pytest
import torch

from scatterpar.devices.clocks import DeviceClock


def test_host_is_done_with_what_it_has_launched():
    clock = DeviceClock(torch.device("cpu"))
    time.sleep(0.01)
    clock.stop()
    assert clock.launching >= 0.01
    assert clock.working() == clock.launching


@pytest.mark.cuda
@pytest.mark.nullcuda
def test_device_says_how_long_it_has_worked():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("needs an accelerator")
    device = torch.device(accelerator.type, 0)
    values = torch.ones(8, device=device)
    clock = DeviceClock(device)
    values.add_(1)
    time.sleep(0.01)
    values.add_(1)
    clock.stop()
    torch.accelerator.synchronize(device)
    working = clock.working()
    assert working is not None
    assert 0 < working < 60
