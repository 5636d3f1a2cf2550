"""Tensors are compared bit by bit."""

from __future__ import annotations

import pytest
import torch

from scatterpar.devices.bits import as_bytes, pieces_of, same_bits

NAN = torch.tensor([torch.nan])
SAME = [
    (torch.ones(2), torch.ones(2), True),
    (NAN, NAN.clone(), True),
    (torch.zeros(1), -torch.zeros(1), False),
    (torch.ones(2), torch.ones(2, 1), False),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
    (torch.ones(1).expand(3), torch.ones(3), True),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
    (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
    (torch.eye(2), torch.eye(2).to_sparse(), False),
]


@pytest.mark.parametrize(("first", "second", "expected"), SAME)
def test_same_bits_compares_bits(first, second, expected):
    assert same_bits(first, second) is expected


def test_pieces_of_uncoalesced_tensor():
    indices = torch.tensor([[1, 1]])
    values = torch.tensor([2.0, 3.0])
    pieces = pieces_of(torch.sparse_coo_tensor(indices, values, (4,)))
    assert [piece.tolist() for piece in pieces] == [[[1, 1]], [2.0, 3.0]]


def test_bytes_in_order_of_dimensions():
    rows = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    assert as_bytes(rows.T).tolist() == [1, 3, 2, 4]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert as_bytes(conjugate).equal(as_bytes(torch.tensor([1 - 2j])))
