"""Whether tensors hold the bits that others hold, or that they held; and how the host learns it.

-0.0 is not 0.0, and a NaN is equal to itself. Fingerprints stand in place of a copy: each word of
32 bits is multiplied by an odd number of 64 bits that belongs to its position, and
folded; the sums of these are the fingerprint (multilinear hashing: Lemire and Kaser, "Strongly
universal string hashing is fast", 2014, https://arxiv.org/abs/1202.4961). One word that differs
always shows; several do but for about one case in 2**60.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from scatterpar.devices import verbs
from scatterpar.devices.chunks import by_dtype, in_memory_order, messages

Fingerprint = tuple[int, ...]

_WORDS = 2**21  # at a time: what is in between needs some 40 bytes for each

_MULTIPLY, _AGAIN = -0x61C8864680B583EB, 0x2545F4914F6CDD1D  # odd, and without regularity

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Which elements of two dense tensors of one shape and dtype differ: a mask of that shape.

    >>> differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    tensor([ True, False])
    """
    if one.is_complex():
        reals = [torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other)]
        return differing(*reals).any(-1)
    return _as_integers(one.detach()) != _as_integers(other.detach())


def changes(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """For each pair of dense tensors in one memory a flag there: whether any bit differs."""
    return [differing(one, other).any() for one, other in zip(ones, others, strict=True)]


def changed(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """The same on the host, which waits once for all of them."""
    found = changes(ones, others)
    return torch.stack(found).tolist() if found else []


def _as_integers(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])


class Readout:
    """Tensors that the host wants to know: all that were asked for arrive when one is needed.

    >>> readout = Readout()
    >>> flags = readout.ask([torch.tensor(True)])
    >>> counts = readout.ask([torch.tensor(3), torch.tensor(4)])
    >>> flags(), counts()
    ([tensor(True)], [tensor(3), tensor(4)])
    """

    def __init__(self) -> None:
        self._asked: list[Tensor] = []
        self._arrived: list[Tensor] = []

    def ask(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Ask for dense tensors, which must not be written before; what fetches them."""
        start = len(self._asked)
        self._asked += tensors
        stop = len(self._asked)
        return lambda: self._read()[start:stop]

    def _read(self) -> list[Tensor]:
        missing = self._asked[len(self._arrived) :]
        self._arrived += _on_the_host(missing)
        return self._arrived


def _on_the_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of all dtypes travel as bytes, so that there is one message from each device."""
    arrived = [tensor.detach() for tensor in tensors]
    away: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(arrived):
        if tensor.device.type != "cpu":
            away[tensor.device].append(i)
    for positions in away.values():
        parts = [_as_bytes(arrived[i]) for i in positions]
        pieces = torch.cat(parts).cpu().split([len(part) for part in parts])
        for i, piece in zip(positions, pieces, strict=True):
            arrived[i] = piece.clone().view(arrived[i].dtype).view(arrived[i].shape)
    return arrived


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
