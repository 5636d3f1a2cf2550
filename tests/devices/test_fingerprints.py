"""Fingerprints: what tells that bits have changed unseen."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from scatterpar.devices import fingerprints
from scatterpar.devices.fingerprints import Fingerprints

HOST = torch.device("cpu")


def prints(*tensors):
    return Fingerprints(dict(enumerate(tensors)), HOST).values.tolist()


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]


def pieces():
    """Each dtype in one piece; that tensors are read in pieces is a matter of words,
    not of the dtype.
    """
    slow = pytest.mark.slow
    for dtype in DTYPES:
        yield pytest.param(dtype, 2**21, id=f"{dtype}-whole")
        few = [] if dtype == torch.float32 else [slow]
        yield pytest.param(dtype, 3, id=f"{dtype}-3", marks=few)


@pytest.mark.parametrize(("dtype", "words"), [*pieces()])
def test_every_changed_bit_shows(monkeypatch, dtype, words):
    """Of a single bit, and of many."""
    monkeypatch.setattr(fingerprints, "_WORDS_IN_THE_HOST", words)
    numbers = torch.arange(1.0, 11)
    tensor = numbers.to(dtype)
    before, raw = prints(tensor), tensor.view(torch.uint8)
    assert prints(torch.cat([tensor[:1], tensor])[1:]) == before, "elsewhere in memory"
    for byte, bit in product(range(len(raw)), range(8)):
        raw[byte] ^= 1 << bit
        assert prints(tensor) != before, (byte, bit)
        raw[byte] ^= 1 << bit
    assert prints(tensor) == before
    if dtype.is_floating_point:
        others = [
            -numbers,
            numbers.flip(0),
            numbers.roll(1),
            numbers.roll(5),
            numbers * torch.nan,
        ]
        others += [numbers[[1, 0, *range(2, 10)]], 0 * numbers]
        assert before not in [prints(other.to(dtype)) for other in others]


def mixed(position):
    """The factor of a position."""
    number = position * -0x61C8864680B583EB % 2**64
    number ^= signed(number) >> 30
    number = number * 0x2545F4914F6CDD1D % 2**64
    number ^= signed(number) >> 27
    return number % 2**64 | 1


def signed(number):
    """A 64-bit word as torch's int64 has it: its shift to the right keeps the sign."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def test_sum_of_mixed_words_by_hand():
    """Of the integers 7 and -2, computed with Python's integers."""
    products = [7 * mixed(1), -2 * mixed(2)]
    expected = signed(sum(signed(p) ^ signed(p) >> 32 for p in products))
    assert prints(torch.tensor([7, -2], dtype=torch.int32)) == [expected]


def test_differing_tensors_are_numbered(monkeypatch):
    """In pieces of two words each: 3, 1 and 2 pieces."""
    monkeypatch.setattr(fingerprints, "_WORDS_IN_THE_HOST", 2)
    tensors = {4: torch.zeros(5), 7: torch.zeros(2), 9: torch.zeros(3)}
    before = Fingerprints(tensors, HOST)
    assert sorted(before.owners) == [4, 4, 4, 7, 9, 9]
    tensors[4][4] = 1.0
    tensors[9][0] = -0.0
    after = Fingerprints(tensors, HOST)
    assert after.differing_from(before) == {4, 9}
    assert after.differing_from(after) == set()


def test_no_tensors_do_not_differ():
    nothing = Fingerprints({}, HOST), Fingerprints({3: torch.zeros(0)}, HOST)
    assert nothing[0].differing_from(nothing[1]) == set()
