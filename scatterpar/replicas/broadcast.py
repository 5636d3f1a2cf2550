"""Copies of the master's tensors in the other memories: each memory gets a changed tensor once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import (
    Message,
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
    """Copies of dense ``tensors`` on every device of ``device_ids`` except the first.

    A parameter is sent if its version has changed since it was last sent, for example by an
    optimizer step. Writes through ``.data``, a NumPy view or another storage do not change the
    version. So the fingerprints of the other parameters are compared with those of the copies on
    another device. So are the fingerprints of buffers, whose versions every commit changes.
    ``weights`` has the ids of the tensors that count as parameters.

    The owner of a tensor, in ``update`` the master, sends it chunk by chunk. Every device that has
    a chunk sends it on, in the rounds of ``tree_rounds`` from last to first.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        device_ids: Sequence[torch.device],
        weights: Collection[int] = (),
    ) -> None:
        for tensor in tensors:
            refuse_sparse("a module or criterion has", tensor)
        self._tensors = tensors
        self._key = self.memories, self.parameters, _ = _key(tensors, device_ids, weights)
        self._copies = {
            device: empty_like_on(tensors, device, lambda t: id(t) in weights and _is_dense(t))
            for device in self.memories[1:]
        }
        self._flats = {  # their elements in the order of memory, 1-D
            device: list(map(flat_view, there)) for device, there in self._copies.items()
        }
        self._kinds = list(map(_kind, tensors))
        self._fingerprints: dict[int, Fingerprint] = {}  # those known of the sent values
        self._sent: dict[int, int] = {}  # the versions of the sent values
        self._find_places()

    def is_of(
        self,
        tensors: Sequence[Tensor],
        device_ids: Sequence[torch.device],
        weights: Collection[int],
    ) -> bool:
        """Whether these are the same tensors, of the same kinds, on the same devices."""
        return _key(tensors, device_ids, weights) == self._key and self._find_places()

    def fits(self) -> bool:
        """Whether the tensors still have their kinds and shapes. Looks up new storages."""
        return all(map(Tensor.is_set_to, self._tensors, self._places)) or self._find_places()

    def at(self, device: torch.device) -> Sequence[Tensor]:
        """The tensors in the memory of ``device``."""
        return self._tensors if device == self.memories[0] else self._copies[device]

    def storages(self, device: torch.device) -> list[Tensor]:
        """Where a new replica's tensors are stored: ``at(device)``, but new memory for buffers."""
        storages, weights = list(self.at(device)), set(self.parameters)
        private = [i for i in range(len(storages)) if i not in weights]
        new = empty_like_on([self._tensors[i] for i in private], device, _is_plain)
        for i, storage in zip(private, new, strict=True):
            storages[i] = storage
        return storages

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
            here = Fingerprints({i: self._flat(i, master) for i in doubtful}, master)
            there = Fingerprints({i: self._flat(i, other) for i in unknown}, other)
            # The fingerprints are combined on the master, so the host waits for one copy.
            there.values = to_device(there.values, master)
            self._compared = [here, there]
        return self._compared

    def update(self, transfers: Transfers) -> None:
        """Send the master's values of changed tensors, after ``compare``."""
        if not self._copies:
            return
        here, there = [one.read(one.values) for one in self._compared] or ({}, {})
        known = self._fingerprints | there
        unchanged = {i for i, fingerprint in here.items() if fingerprint == known[i]}
        changed = set(range(len(self._tensors))) - unchanged
        self.invalidate()  # until all are sent
        self._send(dict.fromkeys(changed, self.memories[0]), transfers)
        self._sent, self._fingerprints = dict(enumerate(self._versions)), here

    def send(self, owners: Mapping[int, torch.device], transfers: Transfers) -> None:
        """Copy new values from their owner's memory to all others, also to the master's.

        If it fails, the next ``update`` sends the master's values of all tensors.
        """
        self.fits()  # the code that wrote the values may have moved them
        sent = self._sent
        self.invalidate()
        self._send(owners, transfers)
        now = versions(self._tensors)
        self._sent = sent | {i: now[i] for i in owners}
        for i in owners:
            self._fingerprints.pop(i, None)

    def _send(self, owners: Mapping[int, torch.device], transfers: Transfers) -> None:
        """Send each owner's tensors in messages, each over the whole tree before the next."""
        for number, owner in enumerate(self.memories):
            flats = {i: self._flat(i, owner) for i in sorted(owners) if owners[i] == owner}
            from_owner = [*self.memories[number:], *self.memories[:number]]
            for message, flat in iter_messages(flats):
                self._spread(message, flat, from_owner, transfers)
                del flat

    def _find_places(self) -> bool:
        """Look up where the master's tensors are stored. Returns whether they have their kinds."""
        self._places = [tensor.detach() for tensor in self._tensors]
        if self._copies:
            self._flats[self.memories[0]] = list(map(flat_view, self._places))
        return list(map(_kind, self._tensors)) == self._kinds

    def _flat(self, i: int, device: torch.device) -> Tensor:
        """A 1-D view of tensor ``i`` in that memory, in the same order on all devices."""
        flat = self._flats[device][i]
        if flat is None:  # the master's tensor has gaps, or is a conjugate
            tensor = self._tensors[i].detach()
            there = self._copies[self.memories[1]][i]
            dense = tensor.new_empty_strided(there.shape, there.stride())
            write(dense, tensor)
            flat = flat_view(dense)
            assert flat is not None
        return flat

    def _spread(
        self,
        message: Message,
        flat: Tensor,
        from_owner: Sequence[torch.device],
        transfers: Transfers,
    ) -> None:
        """Copy a message from the first device to the others."""
        copies = {0: flat}
        for pairs in reversed(tree_rounds(len(from_owner))):
            for sender, receiver in pairs:
                target = from_owner[receiver]
                parts = message.of({i: self._flat(i, target) for i in message.keys})
                copies[receiver] = deliver(copies[sender], parts, target, transfers, "replicate")


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of no subclass, dense, not expanded, not empty, not lazily negated."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return is_unexpanded(tensor) and tensor.numel() > 0 and not tensor.is_neg()


def _key(
    tensors: Sequence[Tensor], device_ids: Sequence[torch.device], weights: Collection[int]
) -> tuple[list[torch.device], list[int], list[int]]:
    """The memories, the numbers of the parameters, and the ids of the tensors."""
    parameters = [i for i, tensor in enumerate(tensors) if id(tensor) in weights]
    return list(dict.fromkeys(device_ids)), parameters, list(map(id, tensors))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """The properties of ``tensor`` on which copies in other memories depend."""
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0
