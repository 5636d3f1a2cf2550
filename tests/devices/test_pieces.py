"""Lists of tensors in equal pieces, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scatterpar.devices import pieces
from scatterpar.devices.pieces import (
    BYTES_PER_DEVICE,
    Piece,
    cut_into_pieces,
    flat_view,
    in_words,
    needs_pieces,
)

pytestmark = pytest.mark.core


@pytest.fixture
def small(monkeypatch):
    """Pieces of any size are worth a copy."""
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 1)


def parts_of(sizes, devices, max_bytes=2**26, dtype=torch.float32):
    flat = {key: torch.zeros(size, dtype=dtype) for key, size in sizes.items()}
    return [list(piece.parts) for piece in cut_into_pieces(flat, devices, max_bytes)]


@pytest.mark.usefixtures("small")
def test_large_tensors_are_cut_and_small_ones_packed():
    """128 elements for four devices: four pieces of 32."""
    sizes = {"a": 10, "weight": 70, "b": 10, "c": 10, "d": 28}
    assert parts_of(sizes, 5) == [
        [("weight", 0, 48)],
        [("a", 0, 10), ("b", 0, 10), ("c", 0, 10)],
        [("d", 0, 28)],
        [("weight", 48, 70)],
    ]


def test_pieces_have_at_most_so_many_bytes():
    """256 bytes are 64 elements."""
    sizes = [parts[0][2] - parts[0][1] for parts in parts_of({0: 384}, 3, 256)]
    assert sizes == [64] * 6


def test_small_tensors_fill_pieces():
    """Of 16 elements at least, where kernels begin."""
    assert parts_of(dict.fromkeys(range(5), 6), 3, 64) == [
        [(0, 0, 6), (1, 0, 6), (2, 0, 4)],
        [(2, 4, 6), (3, 0, 6), (4, 0, 6)],
    ]


def test_tiny_pieces_are_one():
    """The host would launch copies for longer than a link takes: 64 KiB at least."""
    assert parts_of(dict.fromkeys(range(3), 40), 5) == [[(i, 0, 40) for i in range(3)]]
    sizes = {0: 2**14, 1: 2**12, 2: 2**12, 3: 2**14}
    assert parts_of(sizes, 5) == [
        [(0, 0, 2**14)],
        [(3, 0, 2**14)],
        [(1, 0, 2**12), (2, 0, 2**12)],
    ]


@pytest.mark.usefixtures("small")
def test_parts_of_tensors_are_cut():
    flat = {key: torch.zeros(6) for key in range(5)}
    cut = cut_into_pieces(flat, 3, 64)
    assert [piece.cut for piece in cut] == [[2], [0]]


def test_dtypes_are_apart():
    flat = {
        "a": torch.zeros(3, dtype=torch.float64),
        "b": torch.zeros(4, dtype=torch.complex64),
        "c": torch.zeros(5, dtype=torch.float64),
    }
    cut = cut_into_pieces(flat, 3, 2**26)
    assert [piece.dtype for piece in cut] == [torch.float64, torch.complex64]
    assert [piece.parts for piece in cut] == [
        [("a", 0, 3), ("c", 0, 5)],
        [("b", 0, 4)],
    ]
    assert [piece.nbytes for piece in cut] == [64, 32]


def test_parts_are_views_in_order():
    flat = {"a": torch.arange(4), "b": torch.arange(10, 16)}
    piece = Piece(torch.int64, [("a", 1, 4), ("b", 0, 2)], cut=[0, 1])
    parts = piece.of(flat)
    assert [part.tolist() for part in parts] == [[1, 2, 3], [10, 11]]
    assert parts[0].data_ptr() == flat["a"][1:].data_ptr()
    (whole,) = Piece(torch.int64, [("a", 0, 4)]).of(flat)
    assert whole is flat["a"]
    buffer = torch.zeros(64, dtype=torch.uint8)
    assert piece.in_buffer(buffer).shape == (5,)
    assert piece.in_buffer(buffer).dtype == torch.int64


FLAT = {
    "contiguous": torch.arange(24.0).reshape(2, 3, 4),
    "channels last": torch.arange(120.0)
    .reshape(2, 3, 4, 5)
    .to(memory_format=torch.channels_last),
    "a part": torch.arange(24.0)[3:9],
    "0-dim": torch.ones(()),
    "a parameter": nn.Parameter(torch.ones(2, 2)),
    "complex": torch.ones(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", FLAT)
def test_dense_tensors_have_flat_views(name):
    tensor = FLAT[name]
    flat = flat_view(tensor)
    assert flat.shape == (tensor.numel(),)
    assert flat.data_ptr() == tensor.data_ptr()
    assert not flat.requires_grad
    assert sorted(flat.real.tolist()) == sorted(tensor.real.flatten().tolist())


class Marked(torch.Tensor):
    """A subclass."""


NOT_FLAT = {
    "transposed": torch.ones(2, 3).T,
    "with gaps": torch.ones(4, 4)[:, :2],
    "expanded": torch.ones(1).expand(4),
    "empty": torch.ones(0, 3),
    "sparse": torch.ones(3).to_sparse(),
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "a subclass": torch.ones(3).as_subclass(Marked),
}


@pytest.mark.parametrize("name", NOT_FLAT)
def test_others_have_none(name):
    assert flat_view(NOT_FLAT[name]) is None


WORDS = {
    torch.float32: 1,
    torch.int64: 2,
    torch.float64: 2,
    torch.complex64: 2,
    torch.complex128: 4,
}


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_words_are_views(dtype):
    """Writes to them count as writes to the tensor."""
    tensor = torch.zeros(3, dtype=dtype)
    words = in_words(tensor)
    assert words.dtype == torch.int32
    assert len(words) == 3 * WORDS[dtype]
    before = tensor._version
    words.fill_(-1)
    assert (tensor != 0).all()
    assert tensor._version > before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool], ids=str)
def test_small_elements_are_no_words(dtype):
    """A part of such tensors may begin between two words."""
    assert in_words(torch.zeros(4, dtype=dtype)).dtype == dtype


def test_large_is_so_much_for_each_device_but_one():
    for devices in (3, 4, 8):
        least = (devices - 1) * BYTES_PER_DEVICE
        assert needs_pieces(least, devices)
        assert not needs_pieces(least - 1, devices)
    assert not needs_pieces(2**40, 2)  # one link, in each direction
    assert not needs_pieces(2**40, 1)
