"""Copies of the master's tensors in the other memories.

Each memory gets a changed tensor once.
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
from scatterpar.look_steps import is_look_step
from scatterpar.replicas.checks import refuse_sparse
from scatterpar.replicas.large_tensors import is_large, sample
from scatterpar.replicas.module_contents import ModuleContents

_VERSION = attrgetter("_version")
_Compared = tuple[tuple[int, ...], tuple[int, ...]]


def version(tensor: Tensor) -> int:
    """How often ``tensor`` was written; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version of each tensor, as from ``version``."""
    try:
        return list(map(_VERSION, tensors))  # without a Python call per tensor
    except RuntimeError:  # there are inference tensors
        return list(map(version, tensors))


class Broadcast:
    """Copies of the dense tensors in ``contents`` on every device except the first.

    ::

        version changed since it was sent     send it
        version as it was, or a buffer        compare fingerprints, send what differs
        the same, of a large tensor           fingerprints of a sample, see
                                              ``large_tensors``

    An optimizer step changes the version. Writes through ``.data``, a NumPy view or
    another storage do not. So the fingerprints of the other parameters are compared
    with those of the copies on another device. So are the fingerprints of buffers,
    whose versions every commit changes.

    The owner of a tensor, in ``update`` the master, sends it message by message. Every
    device that has a message sends it on, in the reverse order of ``tree_pairs``.

    Attributes:
        contents: the module's contents that were sent.
        memories: the devices, each once; the master is the first.
        parameters: the numbers of the tensors that are parameters.
    """

    def __init__(
        self, contents: ModuleContents, device_ids: Sequence[torch.device]
    ) -> None:
        self.contents = contents
        self._tensors = list(contents.tensors.values())
        for tensor in self._tensors:
            refuse_sparse("a module or criterion has", tensor)
        self.memories = list(dict.fromkeys(device_ids))
        self.parameters = [
            number
            for number, key in enumerate(contents.tensors)
            if key in contents.weights
        ]
        self._layout = _layout(contents)
        # Aliases, to see later whether a tensor's storage, shape or strides were
        # exchanged.
        self._places = list(map(Tensor.detach, self._tensors))
        self._copies = {
            device: empty_like_on(self._tensors, device) for device in self.memories[1:]
        }
        self._messages = messages(dict(enumerate(self._tensors)))
        self._large = {
            number for number, tensor in enumerate(self._tensors) if is_large(tensor)
        }
        self._comparisons = 0
        self._without_version: set[int] = set()  # large ones that were written so
        self.invalidate()

    def is_of(
        self, contents: ModuleContents, device_ids: Sequence[torch.device]
    ) -> bool:
        """Whether these are the same tensors, of the same kinds and devices."""
        if list(dict.fromkeys(device_ids)) != self.memories:
            return False
        if _layout(contents) != self._layout:
            return False
        self.contents = contents  # another root may hold the same tensors
        self._places = list(map(Tensor.detach, self._tensors))
        return True

    def fits(self) -> bool:
        """Whether the tensors still have their kinds and shapes."""
        # The first question needs no Python call per tensor.
        is_in_place = all(map(Tensor.is_set_to, self._tensors, self._places))
        return is_in_place or self.is_of(self.contents, self.memories)

    def at(self, device: torch.device) -> Sequence[Tensor]:
        """The tensors in the memory of ``device``."""
        is_master = device == self.memories[0]
        return self._tensors if is_master else self._copies[device]

    def storages(self, device: torch.device) -> list[Tensor]:
        """Where a new replica's tensors are stored.

        ``at(device)``, but new memory for buffers.
        """
        storages = list(self.at(device))
        buffers = sorted(set(range(len(storages))).difference(self.parameters))
        private = empty_like_on([self._tensors[i] for i in buffers], device)
        for number, tensor in zip(buffers, private, strict=True):
            storages[number] = tensor
        return storages

    def invalidate(self) -> None:
        """Send all tensors the next time, also unchanged ones."""
        self._sent: dict[int, int] = {}  # the versions of the sent values
        # Of the sent values, by the numbers of the tensors, and of those that are
        # sampled.
        self._known: dict[_Compared, Fingerprints] = {}

    def compare(self, *, trusts_versions: bool = False) -> Tensor:
        """Compare tensors that may have changed with their copies.

        Returns what differs. ``update`` needs the result on the host, which waits once
        for those of several objects. ``trusts_versions``: a tensor with the version
        that was sent has not changed.
        """
        parameters = set(self.parameters)
        self._present = versions(self._tensors)  # before the values are read
        self._comparisons += 1
        self._trusted: set[int] = set()
        doubtful: list[int] = []
        sampled: list[int] = []
        for number, sent in self._sent.items():
            is_as_sent = sent == self._present[number]
            if is_as_sent and trusts_versions:
                self._trusted.add(number)
                continue
            # A small one is cheap to read, so its version need not be believed.
            if number not in self._large:
                if is_as_sent or number not in parameters:
                    doubtful.append(number)
            elif is_as_sent or number in self._without_version:
                doubtful.append(number)
                is_read_whole = is_look_step(self._comparisons)
                if number not in self._without_version and not is_read_whole:
                    sampled.append(number)
        self._compared: dict[_Compared, Fingerprints] = {}
        if not doubtful:  # an optimizer has updated all, and there are no buffers
            return empty(0, torch.bool, HOST)
        key = tuple(doubtful), tuple(sampled)
        master = self._fingerprints(self.memories[0], key)
        self._compared[key] = master
        # Those of the copies are known from the last step, unless other tensors are
        # doubtful.
        copies = self._known.get(key)
        if copies is None:
            copies = self._fingerprints(self.memories[1], key)
        return master.differences(copies)

    def update(self, transfers: Transfers, differences: Tensor) -> None:
        """Send the master's values of changed tensors, after ``compare``."""
        if not self._copies:
            return
        present = self._present
        compared = self._compared
        unchanged = self._trusted
        for (doubtful, _), fingerprints in compared.items():
            differing = set(compress(fingerprints.owners, to_numbers(differences)))
            unchanged |= set(doubtful).difference(differing)
            for number in differing:
                if self._sent[number] == present[number]:
                    self._without_version.add(number)
        changed = set(range(len(self._tensors))) - unchanged
        self.invalidate()  # until all are sent
        self._send(self.memories[0], changed, transfers)
        # Last: if a copy failed, all are sent again.
        self._sent = dict(enumerate(present))
        self._known = compared

    def _fingerprints(self, device: torch.device, key: _Compared) -> Fingerprints:
        numbers, sampled = key
        tensors = self.at(device)
        compared = {number: tensors[number] for number in numbers}
        for number in sampled:
            compared[number] = sample(tensors[number])
        return Fingerprints(compared, device)

    def send(self, owners: Mapping[int, torch.device], transfers: Transfers) -> None:
        """Copy new values from their owner's memory to all others, also to the
        master's.

        If it fails, the next ``update`` sends the master's values of all tensors.
        """
        sent = self._sent
        self.invalidate()
        for memory in self.memories:
            owned = {number for number, owner in owners.items() if owner == memory}
            self._send(memory, owned, transfers)
        present = versions(self._tensors)
        self._sent = sent | {number: present[number] for number in owners}

    def _send(
        self, owner: torch.device, numbers: Set[int], transfers: Transfers
    ) -> None:
        """Send the owner's tensors with these numbers, each message to all before the
        next.
        """
        start = self.memories.index(owner)
        devices = [*self.memories[start:], *self.memories[:start]]
        for message in self._messages:
            keys = [number for number in message if number in numbers]
            if not keys:
                continue
            tensors = self.at(owner)
            copies = {0: pack([tensors[key] for key in keys])}
            for sender, receiver in reversed(tree_pairs(len(devices))):
                device = devices[receiver]
                targets = [self.at(device)[key] for key in keys]
                copies[receiver] = deliver(
                    copies[sender], targets, device, transfers, "replicate"
                )
            del copies  # only one message has memory at a time


def _layout(contents: ModuleContents) -> list[Any]:
    """What copies in other memories depend on, and whether it is a parameter, per
    tensor.
    """
    return [
        (
            key,
            key in contents.weights,
            type(tensor),
            tensor.dtype,
            tensor.device,
            tensor.shape,
            tensor.stride(),
        )
        for key, tensor in contents.tensors.items()
    ]
