"""Compare tensors by fingerprints.

Each 32-bit word is multiplied by an odd 64-bit number that depends on its position. The
product ``x`` is folded by ``x ^= x >> 32``, and the sum is the fingerprint (multilinear
hashing: Lemire and Kaser, 2014, https://arxiv.org/abs/1202.4961). ::

    words      w0        w1        w2
    factors    f0        f1        f2            odd, 64 bits
    sum        fold(w0 * f0) + fold(w1 * f1) + fold(w2 * f2)     modulo 2**64

A change of one word always changes the fingerprint; a change of several words is missed
in about one case of 2**60.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, compress

import torch
from torch import Tensor

from scatterpar.devices import memory
from scatterpar.devices.bits import as_bytes
from scatterpar.devices.coalescing import messages
from scatterpar.devices.copies import to_device, to_numbers
from scatterpar.devices.streams import has_streams
from scatterpar.devices.virtual_devices import HOST

WORDS_AT_A_TIME = 2**21  # at a time; intermediate results need some 40 bytes per word
# For these torch uses one thread, and they stay in its cache.
_WORDS_IN_THE_HOST = 2**14
# Odd pseudo-random numbers, for two rounds of mixing.
_FIRST_MULTIPLIER = -0x61C8864680B583EB
_SECOND_MULTIPLIER = 0x2545F4914F6CDD1D


class Fingerprints:
    """Fingerprints of dense tensors, computed on their device: one per 8 MB, or less.

    Attributes:
        owners: for each value, the key of the tensor that it belongs to.
        values: the fingerprints. They stay on the device if it has streams; else the
            work of several threads has no order there.
    """

    def __init__(self, tensors: Mapping[int, Tensor], device: torch.device) -> None:
        max_words = _WORDS_IN_THE_HOST if device.type == "cpu" else WORDS_AT_A_TIME
        pieces: dict[tuple[int, int], Tensor] = {}
        for key, tensor in tensors.items():
            for number, piece in enumerate(_as_words(tensor, max_words)):
                pieces[key, number] = piece
        largest = max(map(Tensor.numel, pieces.values()), default=0)
        factors = _factors(largest, device)
        self.owners: list[int] = []
        sums = [memory.empty(0, torch.int64, device)]  # ``cat`` needs at least one
        for message in messages(pieces, 4 * max_words):
            self.owners += [key for key, _ in message]
            parts = [pieces[piece_key] for piece_key in message]
            sums.append(_sums(parts, factors))
        self.values = torch.cat(sums)
        if not has_streams(device):
            self.values = to_device(self.values, HOST)

    def differences(self, earlier: Fingerprints) -> Tensor:
        """For each of ``values`` whether ``earlier`` has another one.

        The result is in the memory of ``values``.
        """
        if self.owners != earlier.owners:  # the host has smaller pieces than a GPU
            return torch.ones_like(self.values, dtype=torch.bool)
        return self.values != to_device(earlier.values, self.values.device, copy=True)

    def differing_from(self, earlier: Fingerprints) -> set[int]:
        """The keys of the tensors whose ``earlier`` fingerprints are not these."""
        if self.owners != earlier.owners:
            return set(self.owners)
        # As numbers: a worker compares no tensors that are in host memory.
        pairs = zip(to_numbers(self.values), to_numbers(earlier.values), strict=True)
        return set(compress(self.owners, (now != before for now, before in pairs)))


def _as_words(tensor: Tensor, max_words: int) -> Sequence[Tensor]:
    """The tensor as 32-bit words, or as bytes if their number is no multiple of four.

    They are in 1-D pieces of at most ``max_words``; there is none for an empty tensor.
    """
    words = as_bytes(tensor)
    if words.numel() % 4 == 0:
        if words.storage_offset() % 4:
            words = words.clone()  # aligned, as a view of words has to be
        words = words.view(torch.int32)
    pieces: tuple[Tensor, ...] = words.split(max_words)
    return pieces if words.numel() else ()


def _sums(parts: Sequence[Tensor], factors: Tensor) -> Tensor:
    """For each piece the sum of its scattered words: a 1-D tensor.

    One kernel each computes the products, their running sum, and its values where
    pieces end: the sum of a piece is the difference of two of these.
    """
    sizes = [len(part) for part in parts]
    factors_of_size = {size: factors[:size] for size in set(sizes)}
    all_factors = torch.cat([factors_of_size[size] for size in sizes])
    running = _scattered(torch.cat(list(parts)), all_factors).cumsum(0)
    ends = torch.stack([running[end - 1] for end in accumulate(sizes)])
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def _scattered(words: Tensor, factors: Tensor) -> Tensor:
    """Products modulo 2**64, folded.

    Without the fold the upper bits of a word would affect few bits.
    """
    products = words * factors
    products ^= products >> 32
    return products


def _factors(size: int, device: torch.device) -> Tensor:
    """An odd pseudo-random number for each position."""
    numbers = memory.empty(size, torch.int64, device)
    torch.arange(1, size + 1, out=numbers, device=numbers.device)
    # A product carries bits up, a shift carries them down again.
    numbers *= _FIRST_MULTIPLIER
    numbers ^= numbers >> 30
    numbers *= _SECOND_MULTIPLIER
    numbers ^= numbers >> 27
    # A product with an odd number loses no bit of the word.
    return numbers.bitwise_or_(1)
