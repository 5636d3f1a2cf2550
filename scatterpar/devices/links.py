"""Whether bytes arrive as they were sent, from card to card; where not, they take a detour.

Copies between two cards go past the host, by peer access, and on some machines they bring other
bytes, or none, without any error: with an IOMMU that translates them, with PCIe's access control
(ACS), with a faulty driver. See https://github.com/pytorch/pytorch/issues/84803 and
https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from scatterpar.devices.chunks import rounds
from scatterpar.devices.ledger import DETOURS, Ledger
from scatterpar.devices.verbs import physical
from scatterpar.report import warn

_BYTES = 2**20
_BYTES_IN_THE_HOST = 2**14  # torch shares no work of this size out: a forked child could not


class LinkCheck:
    """Looks once, when it is first called, whether copies between these devices arrive as sent."""

    def __init__(self, device_ids: Sequence[torch.device]) -> None:
        self._device_ids = device_ids
        self._done = False

    def __call__(self) -> None:
        """As ``check_links``; again at the next call, where it raised."""
        if not self._done:
            with torch.inference_mode(False), torch.no_grad():
                check_links(self._device_ids)
            self._done = True


def check_links(device_ids: Sequence[torch.device]) -> None:
    """Send known bytes from the first device to each other one and back, and compare.

    And between those that parameters and gradients go between, on a tree over all devices and on
    one over all replicas.

    A megabyte, or less where all devices lie in the host's memory.

    Where bytes changed, copies from that device to that other one go through the host's memory
    from now on, and a warning says so. What is sent here is counted nowhere.

    Raises:
        RuntimeError: bytes change on the way through the host's memory too.
    """
    memories = list(dict.fromkeys(device_ids))
    ways = [(memories[0], other) for other in memories[1:]]
    for places in (memories, device_ids):
        ways += [(places[near], places[far]) for near, far in chain(*rounds(len(places)))]
    for one, other in dict.fromkeys(way for way in ways if way[0] != way[1]):
        for source, target in ((one, other), (other, one)):
            pair = physical(source), physical(target)
            DETOURS.discard(pair)
            in_the_host = {device.type for device in pair} == {"cpu"}
            size = _BYTES_IN_THE_HOST if in_the_host else _BYTES
            if _arrives(source, target, size):
                continue
            DETOURS.add(pair)
            if not _arrives(source, target, size):
                DETOURS.discard(pair)
                raise RuntimeError(
                    f"a copy of {size} bytes from {source} to {target} brought other bytes than "
                    f"were sent, and so it did through the host's memory; nothing that is computed "
                    f"here can be trusted. Run: python -m scatterpar doctor"
                )
            warn(
                f"a copy of {size} bytes from {source} to {target} brought other bytes than "
                f"were sent: copies between them go through the host's memory from now on, "
                f"which is slower, and exact. To find the reason, run: python -m scatterpar doctor"
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
    Ledger().copy_into(arrived, sent.to(physical(source)), "replicate")
    return torch.equal(arrived, sent.to(there))
