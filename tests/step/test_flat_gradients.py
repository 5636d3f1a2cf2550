"""Gradients as parts of flat tensors."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import randn

from scatterpar.step.flat_gradients import FlatGradients, have_equal_places

pytestmark = pytest.mark.core
CPU = torch.device("cpu")


def gradients():
    return {
        3: randn(3, 5),
        0: randn(4, 4).T,
        1: randn(7).float(),
        5: randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        2: randn(1)[0],
        4: randn(1, 3).expand(8, 3),
    }


def flat_like(some):
    flat = FlatGradients()
    flat.add_like(some, CPU)
    return flat


def test_parts_fill_flat_tensors_of_each_dtype():
    flat = flat_like(gradients())
    assert {tensor.dtype: len(tensor) for tensor in flat.flat.values()} == {
        torch.float64: 15 + 16 + 96 + 1 + 24,
        torch.float32: 7,
    }
    for number, tensor in flat.flat.items():
        tensor.fill_(number)
    for position, part in flat.parts.items():
        assert part.shape == gradients()[position].shape
        assert part.stride() == torch.empty_like(gradients()[position]).stride()
        assert (part == (part.dtype == torch.float32)).all()


def test_parts_do_not_overlap_and_most_are_aligned():
    flat = flat_like(gradients())
    for position, part in flat.parts.items():
        part.fill_(position + 1.0)
    for position, part in flat.parts.items():
        assert (part == position + 1.0).all()
        if part.numel() % 16 == 0:
            assert part.storage_offset() % 16 == 0


def test_parts_count_their_own_writes():
    """One is written in place, while a graph has saved another."""
    flat = flat_like(gradients())
    before = flat.parts[3]._version
    flat.parts[0].add_(1)
    flat.flat[0].add_(1)
    assert flat.parts[3]._version == before


def test_copies_have_memory_of_their_own():
    values = gradients()
    flat = flat_like(values)
    for position, part in flat.parts.items():
        part.copy_(values[position])
    copies = flat.copied_parts()
    for tensor in flat.flat.values():
        tensor.zero_()
    assert copies.keys() == values.keys()
    for position, copy in copies.items():
        assert torch.equal(copy, values[position])
        assert copy.untyped_storage().nbytes() == copy.nbytes


def test_later_leaves_are_added():
    values = gradients()
    flat = flat_like({position: values[position] for position in (0, 1)})
    first = flat.parts[0]
    flat.add_like(values, CPU)
    assert flat.parts[0] is first
    assert flat.parts.keys() == values.keys()


def test_equal_places():
    values = gradients()
    alike = [flat_like(values), flat_like(values)]
    assert have_equal_places(alike)
    assert not have_equal_places([*alike, None])
    assert not have_equal_places([None, *alike])
    del values[2]
    assert not have_equal_places([*alike, flat_like(values)])
    other = gradients()
    other[0] = other[0].contiguous()
    assert not have_equal_places([*alike, flat_like(other)])
