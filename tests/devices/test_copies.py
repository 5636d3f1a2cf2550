"""Copies between memories that no step counts; those around a link that corrupts them
are in ``test_links.py``.
"""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.copies import to_device, to_numbers, write

VIRTUAL = torch.device("cpu:1")


def test_to_device_copies_if_asked():
    """A virtual device is the host to torch."""
    tensor = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensor.requires_grad_(True)
    assert to_device(tensor, VIRTUAL) is tensor
    copied = to_device(tensor, VIRTUAL, copy=True)
    assert copied.data_ptr() != tensor.data_ptr()
    assert copied.stride() == tensor.stride()
    copied.sum().backward()
    assert tensor.grad.equal(torch.ones_like(tensor))


def test_write_casts_and_keeps_memory():
    target = torch.zeros(3, dtype=torch.float64)
    address = target.data_ptr()
    write(target, torch.tensor([1, 2, 3]))
    assert target.tolist() == [1.0, 2.0, 3.0]
    assert (target.data_ptr(), target.dtype) == (address, torch.float64)


@pytest.mark.parametrize(
    ("tensor", "numbers"),
    [
        (torch.tensor(2.5, requires_grad=True), 2.5),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([True, False]), [True, False]),
    ],
)
def test_to_numbers_nests_lists(tensor, numbers):
    assert to_numbers(tensor) == numbers
