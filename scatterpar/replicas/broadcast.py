"""Copies of the master's tensors in the other memories: each memory gets a changed tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import (
    deliver,
    empty_like_on,
    flat_view,
    is_unexpanded,
    iter_messages,
    tree_rounds,
)
from scatterpar.devices.fingerprints import Fingerprint, Fingerprints
from scatterpar.devices.transfers import Transfers, to_device, write
from scatterpar.replicas.checks import refuse_sparse
from scatterpar.replicas.module_copy import ModuleContents

_VERSION = attrgetter("_version")


def version(tensor: Tensor) -> int:
    """How often ``tensor`` was written; 0 for inference tensors, which do not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version of each tensor, as from ``version``."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # there are inference tensors
        return list(map(version, tensors))


class Broadcast:
    """Copies of the dense tensors in ``contents`` on every device except the first.

    A parameter is sent if its version has changed since it was last sent, for example by an
    optimizer step. Writes through ``.data``, a NumPy view or another storage do not change the
    version. So the fingerprints of the other parameters are compared with those of the copies on
    another device. So are the fingerprints of buffers, whose versions every commit changes.

    The owner of a tensor, in ``update`` the master, sends it chunk by chunk. Every device that has
    a chunk sends it on, in the rounds of ``tree_rounds`` from last to first.
    """

    def __init__(self, contents: ModuleContents, device_ids: Sequence[torch.device]) -> None:
        self.contents, self._tensors = contents, list(contents.tensors.values())
        for tensor in self._tensors:
            refuse_sparse("a module or criterion has", tensor)
        self.memories = list(dict.fromkeys(device_ids))
        self.parameters = [i for i, key in enumerate(contents.tensors) if key in contents.weights]
        self._rows = _rows(contents)
        self._copies = {
            device: empty_like_on(self._tensors, device, self._is_dense_weight)
            for device in self.memories[1:]
        }
        self._flats = {  # their elements in the order of memory, 1-D
            device: list(map(flat_view, there)) for device, there in self._copies.items()
        }
        self._fingerprints: dict[int, Fingerprint] = {}  # those known of the sent values
        self._sent: dict[int, int] = {}  # the versions of the sent values
        self._find_places()

    def is_of(self, contents: ModuleContents, device_ids: Sequence[torch.device]) -> bool:
        """Whether these are the same tensors, of the same kinds, on the same devices."""
        if list(dict.fromkeys(device_ids)) != self.memories or _rows(contents) != self._rows:
            return False
        self.contents = contents  # another root may hold the same tensors
        self._find_places()
        return True

    def fits(self) -> bool:
        """Whether the tensors still have their kinds and shapes. Looks up new storages."""
        is_in_place = all(map(Tensor.is_set_to, self._tensors, self._places))
        return is_in_place or self.is_of(self.contents, self.memories)

    def at(self, device: torch.device) -> Sequence[Tensor]:
        """The tensors in the memory of ``device``."""
        return self._tensors if device == self.memories[0] else self._copies[device]

    def storages(self, device: torch.device) -> list[Tensor]:
        """Where a new replica's tensors are stored: ``at(device)``, but new memory for buffers."""
        private = sorted(set(range(len(self._tensors))).difference(self.parameters))
        new = empty_like_on([self._tensors[i] for i in private], device, _is_plain)
        buffers = dict(zip(private, new, strict=True))
        return [buffers.get(i, tensor) for i, tensor in enumerate(self.at(device))]

    def invalidate(self) -> None:
        """Send all tensors the next time, also unchanged ones."""
        self._sent = {}

    def compare(self) -> list[Fingerprints]:
        """Returns fingerprints of tensors that may have changed.

        ``update`` needs their ``values`` on the host, which waits once for all objects like this.
        """
        self._compared: list[Fingerprints] = []
        if not self._copies:
            return []
        now = self._versions = versions(self._tensors)  # read before the values
        parameters = set(self.parameters)
        doubtful = [i for i, old in self._sent.items() if old == now[i] or i not in parameters]
        if doubtful:  # else an optimizer has updated all, and there are no buffers
            master, other = self.memories[:2]
            unknown = [i for i in doubtful if i not in self._fingerprints]
            here = Fingerprints(self._flats_at(master, doubtful), master)
            there = Fingerprints(self._flats_at(other, unknown), other)
            # The fingerprints are combined on the master, so the host waits for one copy.
            there.values = to_device(there.values, master)
            self._compared = [here, there]
        return self._compared

    def update(self, transfers: Transfers) -> None:
        """Send the master's values of changed tensors, after ``compare``."""
        if not self._copies:
            return
        here, there = [each.read(each.values) for each in self._compared] or ({}, {})
        known = self._fingerprints | there
        unchanged = {i for i, fingerprint in here.items() if fingerprint == known[i]}
        changed = set(range(len(self._tensors))) - unchanged
        self.invalidate()  # until all are sent
        self._send(self.memories[0], sorted(changed), transfers)
        self._sent, self._fingerprints = dict(enumerate(self._versions)), here

    def send(self, owners: Mapping[int, torch.device], transfers: Transfers) -> None:
        """Copy new values from their owner's memory to all others, also to the master's.

        If it fails, the next ``update`` sends the master's values of all tensors.
        """
        self.fits()  # the code that wrote the values may have moved them
        sent = self._sent
        self.invalidate()
        for owner in self.memories:
            self._send(owner, [i for i in sorted(owners) if owners[i] == owner], transfers)
        now = versions(self._tensors)
        self._sent = sent | {i: now[i] for i in owners}
        for i in owners:
            self._fingerprints.pop(i, None)

    def _send(self, owner: torch.device, numbers: Sequence[int], transfers: Transfers) -> None:
        """Send the owner's tensors with these numbers, each message to all before the next."""
        start = self.memories.index(owner)
        devices = [*self.memories[start:], *self.memories[:start]]
        flats = [self._flats_at(device, numbers) for device in devices]
        for message, flat in iter_messages(flats[0]):
            copies = {0: flat}
            for sender, receiver in chain(*reversed(tree_rounds(len(devices)))):
                to = message.of(flats[receiver]), devices[receiver]
                copies[receiver] = deliver(copies[sender], *to, transfers, "replicate")
            del copies, flat

    def _is_dense_weight(self, tensor: Tensor) -> bool:
        is_weight = id(tensor) in self.contents.weights
        return is_weight and tensor.is_contiguous() and tensor.numel() > 0

    def _find_places(self) -> None:
        self._places = [tensor.detach() for tensor in self._tensors]
        if self._copies:
            self._flats[self.memories[0]] = list(map(flat_view, self._places))

    def _flats_at(self, device: torch.device, numbers: Iterable[int]) -> dict[int, Tensor]:
        """1-D views of tensors in that memory, in the same order on all devices."""
        flats = self._flats[device]
        return {i: self._dense(i) if (flat := flats[i]) is None else flat for i in numbers}

    def _dense(self, i: int) -> Tensor:
        """A 1-D copy of the master's tensor ``i``, which has gaps, or is a conjugate."""
        there = self._copies[self.memories[1]][i]
        dense = self._places[i].new_empty_strided(there.shape, there.stride())
        write(dense, self._places[i])
        return dense.as_strided((dense.numel(),), (1,))


def _rows(contents: ModuleContents) -> list[Any]:
    """For each tensor what copies in other memories depend on, and whether it is a parameter."""
    return [
        (key, key in contents.weights, type(t), t.dtype, t.device, t.shape, t.stride())
        for key, t in contents.tensors.items()
    ]


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of no subclass, dense, not expanded, not empty, not lazily negated."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return is_unexpanded(tensor) and tensor.numel() > 0 and not tensor.is_neg()
