"""What an error about two devices says of a call on a replica."""

import pytest
import torch

from scatterpar.integrations.device_errors import explained

HERE = torch.device("cpu")
OF_TWO = [
    "Expected all tensors to be on the same device, but found at least two devices, "
    "cuda:0 and cuda:1!",
    "Expected all tensors to be on the same device, but got weight is on cuda:0, "
    "different from other tensors on cuda:1 (when checking an argument)",
]
OTHERS = [
    "a bug on this device",
    "CUDA error: device-side assert triggered on cuda:1",
    "Expected all tensors to be on the same device, but found at least two devices, "
    "cpu and cuda:0!",
    "the keys cuda:0 and cuda:1 are missing",
]


@pytest.mark.parametrize("text", OF_TWO)
def test_tensor_of_another_device_is_told(text):
    error = RuntimeError(text)
    words = "computes on cpu, but .* a tensor of another device.*, device=x.device.*"
    words += "a parameter of the model, and leave out parallel=True"
    with pytest.raises(RuntimeError, match=words) as raised, explained(HERE):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("text", OTHERS)
def test_other_error_stays(text):
    error = RuntimeError(text)
    with pytest.raises(RuntimeError) as raised, explained(HERE):
        raise error
    assert raised.value is error
