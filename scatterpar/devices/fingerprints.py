"""Whether tensors hold the bits that others hold, or that they held; whether copies bring them.

-0.0 is not 0.0, and a NaN is equal to itself. Fingerprints stand in place of a copy: each word of
32 bits is multiplied by an odd number of 64 bits that belongs to its position, and
folded; the sums of these are the fingerprint (multilinear hashing: Lemire and Kaser, "Strongly
universal string hashing is fast", 2014, https://arxiv.org/abs/1202.4961). One word that differs
always shows; several do but for about one case in 2**60.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import runtime
from scatterpar.devices.coalescing import as_bytes, by_dtype, flat_view, messages
from scatterpar.devices.runtime import physical
from scatterpar.devices.transfers import HOST_STAGED, Transfers, pieces_of
from scatterpar.report import warn

Fingerprint = tuple[int, ...]
Route = tuple[torch.device, torch.device]

_WORDS = 2**21  # at a time: what is in between needs some 40 bytes for each

_MULTIPLY, _AGAIN = -0x61C8864680B583EB, 0x2545F4914F6CDD1D  # odd, and without regularity

_BYTES = 2**20
_BYTES_IN_THE_HOST = 2**14  # torch shares no work of this size out: a forked child could not


class Fingerprints:
    """Those of dense tensors in one memory, computed there; the host reads ``values``."""

    def __init__(self, tensors: Mapping[int, Tensor], device: torch.device) -> None:
        self._owners: list[int] = []
        words = {i: _words(_flat(tensor.detach())) for i, tensor in tensors.items()}
        longest = max(map(Tensor.numel, words.values()), default=0)
        factors = _factors(min(_WORDS, longest), device)
        sums = [runtime.empty(0, torch.int64, device)]
        for numbers in by_dtype(words.items()).values():
            for message in messages(tuple([(i, words[i].numel()) for i in numbers]), _WORDS):
                self._owners += [piece.key for piece in message.pieces]
                sums.append(_sums(message.of(words), message.sizes, factors))
        self.values = torch.cat(sums)
        self._keys = list(tensors)

    def read(self, values: Tensor) -> dict[int, Fingerprint]:
        """Each tensor's, from ``values`` on the host."""
        found: dict[int, Fingerprint] = dict.fromkeys(self._keys, ())
        for owner, value in zip(self._owners, values.tolist(), strict=True):
            found[owner] += (value,)
        return found


def _flat(tensor: Tensor) -> Tensor:
    """The elements, 1-D, in the same order for all tensors of the same strides."""
    flat = flat_view(tensor)
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
    numbers = runtime.empty(size, torch.int64, device)
    torch.arange(size, out=numbers, device=numbers.device)  # else on the user's default device
    numbers.add_(1).mul_(_MULTIPLY)
    numbers ^= numbers >> 30
    numbers.mul_(_AGAIN)
    numbers ^= numbers >> 27
    return numbers.bitwise_or_(1)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are in one memory, and alike in shape, dtype and bits.

    Sparse ones in each of their pieces. Of quantised ones nothing is known.
    """
    if _kind(one) != _kind(other) or one.is_quantized:
        return False
    pairs = zip(pieces_of(one), pieces_of(other), strict=True)
    return all(torch.equal(as_bytes(mine), as_bytes(its)) for mine, its in pairs)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What the host wants to know: dense tensors of all dtypes, in one message from each device.

    They travel as bytes.
    """
    arrived = [tensor.detach() for tensor in tensors]
    away: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(arrived):
        if tensor.device.type != "cpu":
            away[tensor.device].append(i)
    for positions in away.values():
        parts = [as_bytes(arrived[i]) for i in positions]
        pieces = torch.cat(parts).cpu().split([len(part) for part in parts])
        for i, piece in zip(positions, pieces, strict=True):
            arrived[i] = piece.clone().view(arrived[i].dtype).view(arrived[i].shape)
    return arrived


@functools.cache
def check_links(
    device_ids: tuple[torch.device, ...],
    *senders: Callable[[Sequence[torch.device]], Iterable[Route]],
) -> None:
    """Look once whether copies between these devices arrive as sent.

    Copies between two GPUs go past the host, by peer access, and on some machines they bring
    other bytes, or none, without any error: with an IOMMU that translates them, with PCIe's access
    control (ACS), with a faulty driver. See https://github.com/pytorch/pytorch/issues/84803 and
    https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257.

    ``senders`` return the routes of their copies, (source, target). Known bytes are sent over each
    route in both directions, and counted nowhere. Where they
    changed, copies from that device to that other one go through the host's memory from now on, and
    a warning says so.

    Raises:
        RuntimeError: bytes change on the way through the host's memory too.
    """
    routes = dict.fromkeys(route for sender in senders for route in sender(device_ids))
    with torch.inference_mode(False), torch.no_grad():
        for one, other in routes:
            if one != other:
                _find_staged_route(one, other)
                _find_staged_route(other, one)


def _find_staged_route(source: torch.device, target: torch.device) -> None:
    pair = physical(source), physical(target)
    in_the_host = {device.type for device in pair} == {"cpu"}
    size = _BYTES_IN_THE_HOST if in_the_host else _BYTES
    HOST_STAGED.discard(pair)
    if _arrives(source, target, size):
        return
    what = f"a copy of {size} bytes from {source} to {target} brought other bytes than were sent"
    HOST_STAGED.add(pair)
    if not _arrives(source, target, size):
        HOST_STAGED.discard(pair)
        raise RuntimeError(
            f"{what}, and so it did through the host's memory; nothing that is computed here can "
            f"be trusted. Run: python -m scatterpar doctor"
        )
    warn(
        f"{what}: copies between them go through the host's memory from now on, which is slower, "
        f"and exact. To find the reason, run: python -m scatterpar doctor"
    )


@functools.cache
def pattern(size: int) -> Tensor:
    """``size`` bytes on the host that have no regularity; not to be written."""
    numbers = torch.arange(size, dtype=torch.int64, device="cpu")
    return (numbers * 0x9E3779B1 >> 13).to(torch.uint8)


def _arrives(source: torch.device, target: torch.device, size: int) -> bool:
    """Whether a copy by the engine's own verb brings every byte, and not what was there before."""
    sent = pattern(size)
    there = physical(target)
    arrived = (~sent).to(there)
    Transfers().copy_into(arrived, sent.to(physical(source)), "replicate")
    return torch.equal(arrived, sent.to(there))
