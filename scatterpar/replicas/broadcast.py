"""Copies of the master's tensors in the other memories: each memory gets a changed
tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import (
    deliver,
    empty_like_on,
    messages,
    pack,
    tree_pairs,
)
from scatterpar.devices.device_ids import HOST
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.memory import empty
from scatterpar.devices.transfers import Transfers, to_numbers
from scatterpar.replicas.checks import refuse_sparse
from scatterpar.replicas.module_copy import ModuleContents

_VERSION = attrgetter("_version")


def version(tensor: Tensor) -> int:
    """How often ``tensor`` was written; 0 for inference tensors, which do not count
    writes.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version of each tensor, as from ``version``."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # there are inference tensors
        return list(map(version, tensors))


class Broadcast:
    """Copies of the dense tensors in ``contents`` on every device except the first.

    A parameter is sent if its version has changed since it was last sent, for example
    by an optimizer step. Writes through ``.data``, a NumPy view or another storage do
    not change the version. So the fingerprints of the other parameters are compared
    with those of the copies on another device. So are the fingerprints of buffers,
    whose versions every commit changes.

    The owner of a tensor, in ``update`` the master, sends it message by message. Every
    device that has a message sends it on, in the reverse order of ``tree_pairs``.
    """

    def __init__(
        self, contents: ModuleContents, device_ids: Sequence[torch.device]
    ) -> None:
        self.contents, self._tensors = contents, list(contents.tensors.values())
        for tensor in self._tensors:
            refuse_sparse("a module or criterion has", tensor)
        self.memories = list(dict.fromkeys(device_ids))
        self.parameters = [
            i for i, key in enumerate(contents.tensors) if key in contents.weights
        ]
        self._rows, self._places = (
            _rows(contents),
            list(map(Tensor.detach, self._tensors)),
        )
        self._copies = {
            device: empty_like_on(self._tensors, device) for device in self.memories[1:]
        }
        self._messages = messages(dict(enumerate(self._tensors)))
        self.invalidate()

    def is_of(
        self, contents: ModuleContents, device_ids: Sequence[torch.device]
    ) -> bool:
        """Whether these are the same tensors, of the same kinds, on the
        same devices.
        """
        if (
            list(dict.fromkeys(device_ids)) != self.memories
            or _rows(contents) != self._rows
        ):
            return False
        self.contents = contents  # another root may hold the same tensors
        self._places = list(map(Tensor.detach, self._tensors))
        return True

    def fits(self) -> bool:
        """Whether the tensors still have their kinds and shapes."""
        is_in_place = all(map(Tensor.is_set_to, self._tensors, self._places))
        return is_in_place or self.is_of(self.contents, self.memories)

    def at(self, device: torch.device) -> Sequence[Tensor]:
        """The tensors in the memory of ``device``."""
        return self._tensors if device == self.memories[0] else self._copies[device]

    def storages(self, device: torch.device) -> list[Tensor]:
        """Where a new replica's tensors are stored: ``at(device)``, but new memory for
        buffers.
        """
        private = sorted(set(range(len(self._tensors))).difference(self.parameters))
        new = empty_like_on([self._tensors[i] for i in private], device)
        buffers = dict(zip(private, new, strict=True))
        return [buffers.get(i, tensor) for i, tensor in enumerate(self.at(device))]

    def invalidate(self) -> None:
        """Send all tensors the next time, also unchanged ones."""
        self._sent: dict[int, int] = {}  # the versions of the sent values
        self._known: dict[tuple[int, ...], Fingerprints] = {}  # of the sent values

    def compare(self) -> Tensor:
        """Compare tensors that may have changed with their copies. Returns what
        differs.

        ``update`` needs the result on the host, which waits once for those of several
        objects.
        """
        # before the values
        parameters, self._now = set(self.parameters), versions(self._tensors)
        sent = self._sent.items()
        doubtful = tuple(
            i for i, old in sent if old == self._now[i] or i not in parameters
        )
        self._compared: dict[tuple[int, ...], Fingerprints] = {}
        if not doubtful:  # an optimizer has updated all, and there are no buffers
            return empty(0, torch.bool, HOST)
        here = self._compared[doubtful] = self._fingerprints(self.memories[0], doubtful)
        there = self._known.get(doubtful) or self._fingerprints(
            self.memories[1], doubtful
        )
        return here.differences(there)

    def update(self, transfers: Transfers, differences: Tensor) -> None:
        """Send the master's values of changed tensors, after ``compare``."""
        if not self._copies:
            return
        now, unchanged = self._now, set[int]()
        for doubtful, here in self._compared.items():
            unchanged = set(doubtful).difference(
                compress(here.owners, to_numbers(differences))
            )
        changed = set(range(len(self._tensors))) - unchanged
        self.invalidate()  # until all are sent
        self._send(self.memories[0], changed, transfers)
        self._sent, self._known = dict(enumerate(now)), self._compared

    def _fingerprints(
        self, device: torch.device, numbers: Sequence[int]
    ) -> Fingerprints:
        return Fingerprints({i: self.at(device)[i] for i in numbers}, device)

    def send(self, owners: Mapping[int, torch.device], transfers: Transfers) -> None:
        """Copy new values from their owner's memory to all others, also to the
        master's.

        If it fails, the next ``update`` sends the master's values of all tensors.
        """
        sent = self._sent
        self.invalidate()
        for owner in self.memories:
            self._send(owner, {i for i in owners if owners[i] == owner}, transfers)
        now = versions(self._tensors)
        self._sent = sent | {i: now[i] for i in owners}

    def _send(
        self, owner: torch.device, numbers: Set[int], transfers: Transfers
    ) -> None:
        """Send the owner's tensors with these numbers, each message to all before the
        next.
        """
        start = self.memories.index(owner)
        devices = [*self.memories[start:], *self.memories[:start]]
        for message in self._messages:
            keys = [i for i in message if i in numbers]
            if not keys:
                continue
            copies = {0: pack([self.at(owner)[i] for i in keys])}
            for sender, receiver in reversed(tree_pairs(len(devices))):
                device = devices[receiver]
                targets = [self.at(device)[i] for i in keys]
                copies[receiver] = deliver(
                    copies[sender], targets, device, transfers, "replicate"
                )
            del copies  # only one message has memory at a time


def _rows(contents: ModuleContents) -> list[Any]:
    """For each tensor what copies in other memories depend on, and whether it is a
    parameter.
    """
    return [
        (key, key in contents.weights, type(t), t.dtype, t.device, t.shape, t.stride())
        for key, t in contents.tensors.items()
    ]
