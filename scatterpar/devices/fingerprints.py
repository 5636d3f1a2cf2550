"""Compare tensors bit by bit, by fingerprints, and check that copies arrive intact.

Each 32-bit word is multiplied by an odd 64-bit number that depends on its position. The
product ``x`` is folded by ``x ^= x >> 32``, and the sum is the fingerprint (multilinear
hashing: Lemire and Kaser, 2014, https://arxiv.org/abs/1202.4961). A change of one word
always changes the fingerprint; a change of several words is missed in about one case of
2**60.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, compress
from operator import attrgetter

import torch
from torch import Tensor

from scatterpar.devices import memory
from scatterpar.devices.coalescing import messages
from scatterpar.devices.streams import has_streams
from scatterpar.devices.transfers import (
    as_bytes,
    pieces_of,
    to_device,
    to_host,
    to_numbers,
)

_WORDS = 2**21  # at a time; intermediate results need some 40 bytes per word
# for these torch uses one thread, and they stay in its cache
_WORDS_IN_THE_HOST = 2**14
_MULTIPLY, _AGAIN = -0x61C8864680B583EB, 0x2545F4914F6CDD1D  # odd pseudo-random numbers
_KIND = attrgetter("shape", "dtype", "layout", "device")


class Fingerprints:
    """Fingerprints of dense tensors, computed on their device: one value per 8 MB, or
    less.

    The ``values`` stay there, if it has streams; else the work of several threads has
    no order.
    """

    def __init__(self, tensors: Mapping[int, Tensor], device: torch.device) -> None:
        self.owners: list[int] = []  # the key of each value's tensor
        most = _WORDS_IN_THE_HOST if device.type == "cpu" else _WORDS
        words = {i: _words(tensor, most) for i, tensor in tensors.items()}
        pieces = {
            (i, n): piece for i, each in words.items() for n, piece in enumerate(each)
        }
        factors = _factors(max(map(Tensor.numel, pieces.values()), default=0), device)
        sums = [memory.empty(0, torch.int64, device)]
        for message in messages(pieces, 4 * most):
            self.owners += [i for i, _ in message]
            sums.append(_sums([pieces[key] for key in message], factors))
        self.values = torch.cat(sums)
        if not has_streams(device):
            (self.values,) = to_host([self.values])

    def differences(self, other: Fingerprints) -> Tensor:
        """For each of ``values`` whether ``other`` has another one; in the memory of
        ``values``.
        """
        if self.owners != other.owners:  # the host has smaller pieces than a GPU
            return self.values == self.values
        return self.values != to_device(other.values, self.values.device, copy=True)

    def differing_from(self, other: Fingerprints) -> set[int]:
        """The keys of the tensors whose ``other`` fingerprints are not these."""
        return set(compress(self.owners, to_numbers(self.differences(other))))


def _words(tensor: Tensor, most: int) -> Sequence[Tensor]:
    """The tensor as 32-bit words, or as bytes if their number is no multiple of four.

    They are in 1-D pieces of at most ``most``; there is none for an empty tensor.
    """
    words = as_bytes(tensor)
    if words.numel() % 4 == 0:
        words = (words.clone() if words.storage_offset() % 4 else words).view(
            torch.int32
        )
    return (
        words.split(most) if words.numel() > most else [words] if words.numel() else []
    )


def _sums(parts: Sequence[Tensor], factors: Tensor) -> Tensor:
    """For each piece the sum of its scattered words: a 1-D tensor."""
    sizes = [len(part) for part in parts]
    factors_of = {size: factors[:size] for size in set(sizes)}
    if len(parts) == 1:
        return _scattered(parts[0], factors_of[sizes[0]]).sum(0, keepdim=True)
    all_factors = torch.cat([factors_of[size] for size in sizes])
    upto = _scattered(torch.cat(list(parts)), all_factors).cumsum(0)
    ends = torch.stack([upto[end - 1] for end in accumulate(sizes)])
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def _scattered(words: Tensor, factors: Tensor) -> Tensor:
    """Products modulo 2**64. Without the fold the upper bits of a word would affect few
    bits.
    """
    products = words * factors
    products ^= products >> 32
    return products


def _factors(size: int, device: torch.device) -> Tensor:
    """An odd pseudo-random number for each position."""
    numbers = memory.empty(size, torch.int64, device)
    torch.arange(1, size + 1, out=numbers, device=numbers.device).mul_(_MULTIPLY)
    numbers ^= numbers >> 30
    numbers.mul_(_AGAIN)
    numbers ^= numbers >> 27
    return numbers.bitwise_or_(1)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are in one memory, and equal in shape, dtype and bits.

    -0.0 differs from 0.0, and a NaN equals itself. Quantised tensors never count as
    equal.
    """
    if _KIND(one) != _KIND(other) or one.is_quantized:
        return False
    pairs = zip(pieces_of(one), pieces_of(other), strict=True)
    return all(
        torch.equal(as_bytes(piece), as_bytes(other_piece))
        for piece, other_piece in pairs
    )
