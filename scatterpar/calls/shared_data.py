"""Data that calls, or the loop around them, leave in the user's modules.

A call may write ``self.mask = mask`` in ``forward``, or fill a list that a hook knows,
and the loop may clear this list. Copying the modules again for each such call would be
slow. So the replicas go on with what their own ``forward`` has left, on their own
devices, and follow the loop in what it removes. Until new replicas are made, they share
the rest with the user's containers. A step needs copies, and makes new replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.nested import PLAIN
from scatterpar.devices.copies import to_device
from scatterpar.devices.write_counters import versions
from scatterpar.objects.references import MUTABLE_CONTAINERS
from scatterpar.objects.snapshot import Snapshot, entries_of
from scatterpar.replicas.replicas import ReplicaSet

# The names of torch's containers in a module: parameters, hooks and the like.
_REGISTRIES = [
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))
]
# The number of a container, and a key or position in it.
DataPlace = tuple[int, Any]


class SharedData:
    """The data in containers of the user that the replicas of a call share."""

    def __init__(self, replica_set: ReplicaSet) -> None:
        self._replica_set = replica_set
        self._builds = 0
        # Values that no build has found, so that the replicas do not follow them.
        self._left: dict[DataPlace, Any] = {}
        self._containers = Snapshot([])
        self._tensors: Sequence[Tensor] = ()
        self._versions: Sequence[int] = ()

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
        if self._builds != self._replica_set.builds:
            return True
        has_same_contents = self._containers.has_same_contents()
        return has_same_contents and versions(self._tensors) == self._versions

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
        return self._share([])

    def share_left(self, own: Sequence[Mapping[DataPlace, Any]]) -> None:
        """Let the replicas share what a call has left. Other changes than of data wait
        for the next ``follow``.

        Args:
            own: what the replicas except the first have left themselves, for those that
                were called.

        Call it if ``changed_containers`` has yielded any.
        """
        state = self._replica_set.state
        # Changed numbers and flags are copied by ``follow``.
        if state is not None and state.value_changes() is None:
            self._share(own)

    def _share(self, own: Sequence[Mapping[DataPlace, Any]]) -> bool:
        replica_set = self._replica_set
        state = replica_set.state
        changes = None if state is None else state.new_data(self._registries())
        if state is None or changes is None:
            return False
        for number_of_replica, replica in enumerate(replica_set.replicas):
            of_replica: Mapping[DataPlace, Any] = {}
            if 0 < number_of_replica <= len(own):
                of_replica = own[number_of_replica - 1]
            replica.state.restore()
            for number, container, saved in changes:
                known = {id(value) for _, value in entries_of(saved)}
                new: dict[Any, Any] = {}
                for key, value in entries_of(container):
                    if id(value) in known or type(value) in PLAIN:
                        continue
                    if (number, key) in of_replica:
                        new[key] = of_replica[number, key]
                    elif number_of_replica > 0 and replica.copy_of(value) is value:
                        new[key] = _copy_for_replica(value, replica.device)
                replica.refill(number, saved, new)
            replica.state.accept()
        self._remember(changes)
        state.accept()
        replica_set.lacks_data = True
        return True

    def _remember(self, changes: Sequence[tuple[int, Any, Any]]) -> None:
        """Remember what was left in these containers, as it is now."""
        builds = self._replica_set.builds
        if self._builds != builds:
            self._builds = builds
            self._left = {}
        for number, container, saved in changes:
            entries = dict(entries_of(container))
            known = {id(value) for _, value in entries_of(saved)}
            for place in [place for place in self._left if place[0] == number]:
                if entries.get(place[1]) is not self._left[place]:
                    del self._left[place]
            for key, value in entries.items():
                if id(value) not in known and type(value) not in PLAIN:
                    self._left[number, key] = value
        contents = nested.with_contents(list(self._left.values()))[1:]
        self._containers = Snapshot(
            value for value in contents if type(value) in MUTABLE_CONTAINERS
        )
        self._tensors = [value for value in contents if isinstance(value, Tensor)]
        self._versions = versions(self._tensors)

    def _registries(self) -> set[int]:
        """The ``id`` of torch's containers in the modules, which hold no data."""
        registries: set[int] = set()
        for module in self._replica_set.modules:
            registries.update(id(vars(module)[name]) for name in _REGISTRIES)
        return registries


def _copy_for_replica(value: Any, device: torch.device) -> Any:
    """What a replica gets that has left nothing itself, such as one without rows.

    Tensors with a graph are shared.
    """

    def of_tensor(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            return tensor
        return to_device(tensor, device, copy=True)

    return nested.map_tensors(of_tensor, value)
