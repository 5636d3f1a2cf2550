"""Which memory a device stands for."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.virtual_devices import HOST, physical

pytestmark = pytest.mark.core


def test_virtual_devices_are_the_host():
    assert physical(torch.device("cpu:3")) == HOST
    assert physical(torch.device("cuda:1")) == torch.device("cuda:1")
