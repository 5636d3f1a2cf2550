"""Data that calls leave in the user's modules.

A call may write ``self.hidden = hidden`` in ``forward``, or fill a list that a hook
knows. Copying the modules again after each such call would be slow. So after a call the
replicas hold the same objects as the user's containers. A step needs copies, and makes
new replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from scatterpar.replicas.replicas import ReplicaSet

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

    def share(self) -> None:
        """Let the replicas share what a call has left. Other changes than of data wait
        for the next ``follow``.

        Call it if ``changed_containers`` has yielded any.
        """
        replica_set = self._replica_set
        state = replica_set.state
        # Changed numbers and flags are copied by ``follow``.
        if state is None or state.value_changes() is not None:
            return
        numbers = state.new_data(self._registries())
        if numbers is None:
            return
        for replica in replica_set.replicas:
            replica.state.restore()
            for number in numbers:
                replica.refill(number)
            replica.state.accept()
        state.accept()
        replica_set.lacks_data = True

    def _registries(self) -> set[int]:
        """The ``id`` of torch's containers in the modules, which hold no data."""
        registries: set[int] = set()
        for module in self._replica_set.modules:
            registries.update(id(vars(module)[name]) for name in _REGISTRIES)
        return registries
