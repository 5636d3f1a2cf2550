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

from collections.abc import Mapping
from itertools import compress
from operator import attrgetter

import torch
from torch import Tensor

from scatterpar.devices import memory
from scatterpar.devices.bits import as_bytes
from scatterpar.devices.copies import to_device, to_numbers
from scatterpar.devices.streams import has_streams
from scatterpar.devices.virtual_devices import HOST

WORDS_AT_A_TIME = 2**21  # at a time; intermediate results need some 40 bytes per word
# For these torch uses one thread, and they stay in its cache.
_WORDS_IN_THE_HOST = 2**14
# Odd pseudo-random numbers, for two rounds of mixing.
_FIRST_MULTIPLIER = -0x61C8864680B583EB
_SECOND_MULTIPLIER = 0x2545F4914F6CDD1D


_KIND = attrgetter("dtype", "shape")


class Fingerprints:
    """Fingerprints of dense tensors, computed on their device: one per 8 MB, or less.

    Attributes:
        owners: for each value, the key of the tensor that it belongs to.
        values: the fingerprints. They stay on the device if it has streams; else the
            work of several threads has no order there.
        groups: the keys of the tensors that are read together.
    """

    def __init__(
        self,
        tensors: Mapping[int, Tensor],
        device: torch.device,
        like: Fingerprints | None = None,
    ) -> None:
        """``like`` are earlier fingerprints of tensors with the same keys, dtypes and
        shapes: they are read in the same groups.
        """
        max_words = _WORDS_IN_THE_HOST if device.type == "cpu" else WORDS_AT_A_TIME
        self.groups: list[list[int]]
        self.groups = read_together(tensors, max_words) if like is None else like.groups
        self.owners: list[int] = []
        sums = [memory.empty(0, torch.int64, device)]  # ``cat`` needs at least one
        factors = _factors(0, device)
        for keys in self.groups:
            rows = words_of(list(map(tensors.__getitem__, keys)))
            if rows.size(1) > len(factors) < max_words:
                factors = _factors(min(rows.size(1), max_words), device)
            for piece in rows.split(max_words, 1):
                products = piece * factors[: piece.size(1)]
                # Folded, or the upper bits of a word would affect few bits.
                products ^= products >> 32
                self.owners += keys
                sums.append(products.sum(1))
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


def read_together(
    tensors: Mapping[int, Tensor], max_words: int = _WORDS_IN_THE_HOST
) -> list[list[int]]:
    """The keys of dense tensors that are read together: they have one dtype and shape.

    Several of them have at most ``max_words``. Empty tensors are left out.
    """
    # Of thousands of small tensors the host does little for each.
    by_kind: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for key, kind in zip(tensors, map(_KIND, tensors.values()), strict=True):
        by_kind.setdefault(kind, []).append(key)
    groups: list[list[int]] = []
    for keys in by_kind.values():
        num_bytes = tensors[keys[0]].nbytes
        if num_bytes:
            # Words of 32 bits, or bytes if these are no multiple of four.
            num_words = num_bytes if num_bytes % 4 else num_bytes // 4
            count = max(1, max_words // num_words)
            for start in range(0, len(keys), count):
                groups.append(keys[start : start + count])
    return groups


def words_of(tensors: list[Tensor]) -> Tensor:
    """The words of dense tensors of one dtype and shape: a row for each."""
    words = as_bytes(tensors[0] if len(tensors) == 1 else torch.stack(tensors))
    if tensors[0].nbytes % 4 == 0:
        if words.storage_offset() % 4:
            words = words.clone()  # aligned, as a view of words has to be
        words = words.view(torch.int32)
    return words.view(len(tensors), -1)


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
