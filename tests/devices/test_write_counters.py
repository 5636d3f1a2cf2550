"""How often a tensor was written."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.write_counters import version, versions

pytestmark = pytest.mark.core


def test_versions_count_writes():
    """The version of an inference tensor is 0."""
    tensor = torch.zeros(1)
    tensor += 1
    with torch.inference_mode():
        inference_tensor = torch.zeros(1)
        inference_tensor += 1
    assert (version(tensor), version(inference_tensor)) == (1, 0)
    assert versions([tensor, tensor]) == [1, 1]
    assert versions([tensor, inference_tensor]) == [1, 0]
