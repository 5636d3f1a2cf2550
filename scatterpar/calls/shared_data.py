"""Data that calls, or the loop around them, leave in the user's modules.

A call may write ``self.mask = mask`` in ``forward``, or fill a list that a hook knows,
and the loop may clear this list. Copying the modules again for each such call would be
slow. So the replicas get copies of what the first one has left, on their own devices,
and follow the loop in what it removes. What has a graph, or was joined, they share with
the user's containers until new replicas are made. A step makes new replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.nested import PLAIN
from scatterpar.devices.copies import to_device
from scatterpar.objects.left_data import LeftData
from scatterpar.objects.references import MUTABLE_CONTAINERS
from scatterpar.objects.snapshot import entries_of, refill
from scatterpar.replicas.replicas import Replica, ReplicaSet

# The names of torch's containers in a module: parameters, hooks and the like.
_REGISTRIES = [
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))
]


class SharedData:
    """The data in containers of the user that the replicas of a call share."""

    def __init__(self, replica_set: ReplicaSet) -> None:
        self._replica_set = replica_set

    def changed_containers(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield number, container and earlier contents of each of the user's containers
        that has changed since the replicas followed it.
        """
        state = self._replica_set.state
        if state is not None and not state.has_same_contents():
            yield from list(state.changed())

    def is_as_left(self) -> bool:
        """Whether nobody has written what calls have left, since they left it.

        Else new replicas have to be made, which follow it.
        """
        left_data = self._replica_set.left_data
        return left_data is None or left_data.is_as_left()

    def share_removals(self) -> bool:
        """Let the replicas share what the loop has removed, and plain values of it.

        Returns ``False`` if anything else has changed.
        """
        tensors = self._replica_set.contents.tensors
        for _, container, saved in self.changed_containers():
            before = {id(value): value for _, value in entries_of(saved)}
            after = {id(value): value for _, value in entries_of(container)}
            for key in after.keys() - before.keys():
                if type(after[key]) not in PLAIN:
                    return False
            # New replicas free the copies of such a tensor.
            for key in before.keys() - after.keys():
                if not tensors.keys().isdisjoint(map(id, nested.atoms(before[key]))):
                    return False
        return self._share(frozenset())

    def share_left(self, joined: Set[int]) -> None:
        """Let the replicas share what a call has left. Other changes than of data wait
        for the next ``follow``.

        ``joined`` tensors, by ``id``, are not copied.

        Call it if ``changed_containers`` has yielded any.
        """
        # What forward passes have written themselves is other data on each replica.
        if not self.is_as_left():
            return
        state = self._replica_set.state
        # Changed numbers and flags are copied by ``follow``.
        if state is not None and state.value_changes() is None:
            self._share(joined)

    def _share(self, joined: Set[int]) -> bool:
        replica_set = self._replica_set
        state = replica_set.state
        changes = None if state is None else state.new_data(self._registries())
        if state is None or changes is None:
            return False
        first, *others = replica_set.replicas
        new: dict[Replica, list[dict[Any, Any]]] = {first: [{} for _ in changes]}
        # Copies first: if memory runs out, no replica has changed. That of the first
        # replica is not called, and needs none.
        for replica in others:
            copies = _DataCopies(replica, joined)
            new[replica] = [
                copies.of_new(container, saved) for _, container, saved in changes
            ]
        copies_of: defaultdict[int, list[Any]] = defaultdict(list)
        for replica, of_containers in new.items():
            replica.state.restore()
            for change, entries in zip(changes, of_containers, strict=True):
                number, container, saved = change
                replica.refill(number, saved, entries)
                for key, copied in entries.items():
                    copies_of[id(container[key])].append(copied)
            replica.state.accept()
        if replica_set.left_data is None:
            replica_set.left_data = LeftData()
        replica_set.left_data.remember(changes, copies_of)
        state.accept()
        return True

    def _registries(self) -> set[int]:
        """The ``id`` of torch's containers in the modules, which hold no data."""
        registries: set[int] = set()
        for module in self._replica_set.modules:
            registries.update(id(vars(module)[name]) for name in _REGISTRIES)
        return registries


class _DataCopies:
    """Copies of values for a replica: of one value, wherever it is, one copy."""

    def __init__(self, replica: Replica, joined: Set[int]) -> None:
        self._replica = replica
        self._joined = joined
        self._copies: dict[int, Any] = {}

    def of_new(self, container: Any, saved: Any) -> dict[Any, Any]:
        """The copies of what a container has, and had not ``saved``, by place."""
        if isinstance(container, set):  # its entries have no places
            return {}
        known = {id(value) for _, value in entries_of(saved)}
        return {
            key: self.of(value)
            for key, value in entries_of(container)
            if type(value) not in PLAIN and id(value) not in known
        }

    def of(self, value: Any) -> Any:
        """The copy of a value that consists of plain values and tensors.

        Tensors with a graph, and joined ones, are shared.
        """
        if type(value) in PLAIN:
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = self._new(value)
        return self._copies[id(value)]

    def _new(self, value: Any) -> Any:
        copied = self._replica.copy_of(value)
        if copied is not value:
            return copied
        if isinstance(value, Tensor):
            if value.requires_grad or id(value) in self._joined:
                return value
            # Tensors that are made in inference mode could not be trained with later.
            with torch.inference_mode(False), torch.no_grad():
                return to_device(value, self._replica.device, copy=True)
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if type(value) not in MUTABLE_CONTAINERS:
            return value
        copied = value.copy()  # keeps a ``default_factory`` or ``maxlen``
        if isinstance(value, dict):
            copy_of = self._replica.copy_of
            refill(copied, {copy_of(key): self.of(v) for key, v in value.items()})
        else:
            refill(copied, list(map(self.of, value)))
        return copied
