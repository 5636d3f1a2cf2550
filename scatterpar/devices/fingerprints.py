"""Numbers that tell whether a tensor still holds the bits that it held: in place of a copy.

Each word of 32 bits is multiplied by an odd number of 64 bits that belongs to its position, and
folded; the sums of these are the fingerprint (multilinear hashing: Lemire and Kaser, "Strongly
universal string hashing is fast", 2014, https://arxiv.org/abs/1202.4961). One word that differs
always shows; several do but for about one case in 2**60.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from scatterpar.devices import verbs
from scatterpar.devices.chunks import in_memory_order, messages
from scatterpar.devices.flat import by_dtype

__all__ = ["Fingerprint", "Fingerprints"]

Fingerprint = tuple[int, ...]

_WORDS = 2**21  # at a time: what is in between needs some 40 bytes for each
_MULTIPLY, _AGAIN = -0x61C8864680B583EB, 0x2545F4914F6CDD1D  # odd, and without regularity


class Fingerprints:
    """Those of dense tensors in one memory, computed there.

    Args:
        tensors: of any dtypes.
        device: whose memory they are in.

    Attributes:
        values: what ``read`` takes, once it is on the host.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._count = len(tensors)
        self._owners: list[int] = []
        words = [_words(_flat(tensor.detach())) for tensor in tensors]
        longest = max(map(Tensor.numel, words), default=0)
        factors = _factors(min(_WORDS, longest), device)
        sums = [verbs.empty(0, torch.int64, device)]
        for numbers in by_dtype(enumerate(words)).values():
            for message in messages(tuple([(i, words[i].numel()) for i in numbers]), _WORDS):
                self._owners += [piece.key for piece in message.pieces]
                sums.append(_sums(message.of(words), message.sizes, factors))
        self.values = torch.cat(sums)

    def read(self, values: Tensor) -> list[Fingerprint]:
        """Each tensor's, from ``values`` on the host."""
        found: list[list[int]] = [[] for _ in range(self._count)]
        for owner, value in zip(self._owners, values.tolist(), strict=True):
            found[owner].append(value)
        return list(map(tuple, found))


def _flat(tensor: Tensor) -> Tensor:
    """The elements, 1-D, in the same order for all tensors of the same strides."""
    flat = in_memory_order(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1) if flat is None else flat


def _words(tensor: Tensor) -> Tensor:
    """A 1-D tensor as integers of 32 bits, or of 8 where it has no whole number of them."""
    size = tensor.element_size()
    if tensor.numel() * size % 4:
        return tensor.view(torch.uint8)
    if tensor.storage_offset() * size % 4:
        tensor = tensor.clone()
    return tensor.view(torch.int32)


def _sums(parts: Sequence[Tensor], sizes: Sequence[int], factors: Tensor) -> Tensor:
    """For each of some pieces the sum of its words, scattered: 1-D."""
    factors_of = {size: factors[:size] for size in set(sizes)}
    if len(parts) == 1:
        return _scattered(parts[0], factors_of[sizes[0]]).sum(0, keepdim=True)
    own = torch.cat([factors_of[size] for size in sizes])
    upto = _scattered(torch.cat(list(parts)), own).cumsum(0)
    ends = torch.stack([upto[end - 1] for end in accumulate(sizes)])
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def _scattered(words: Tensor, factors: Tensor) -> Tensor:
    """Products modulo 2**64; folded, or the upper bits of words had a say in few of theirs."""
    products = words * factors
    products ^= products >> 32
    return products


def _factors(size: int, device: torch.device) -> Tensor:
    """An odd number for each position, without regularity."""
    numbers = verbs.empty(size, torch.int64, device)
    torch.arange(size, out=numbers, device=numbers.device)  # else on the user's default device
    numbers.add_(1).mul_(_MULTIPLY)
    numbers ^= numbers >> 30
    numbers.mul_(_AGAIN)
    numbers ^= numbers >> 27
    return numbers.bitwise_or_(1)
