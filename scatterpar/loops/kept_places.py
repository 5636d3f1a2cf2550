"""The places that lead to tensors, found once and kept between the calls of a step.

::

    kept = KeptPlaces([owner, *modules])
    …                       # calls
    kept.update()           # whether calls have written anything there

A search takes long beside a small call. So each root is searched by itself, and again
only if something in it has changed, which loops in C tell. A module that calls have
made is a root, too, and so are the modules inside of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from scatterpar.batch.nested import MAX_ENTRIES
from scatterpar.objects.snapshot import Snapshot
from scatterpar.objects.walk import VARIABLES, Place, PlaceKind, Walk

_LEAST_ADDRESS = 2**16  # smaller numbers are no ``id``
_SHARED = PlaceKind.GLOBAL, PlaceKind.CLASS  # variables to which many roots lead


class KeptPlaces:
    """The places that lead to tensors, from roots on.

    Args:
        roots: where the searches begin. Modules that are no roots are not entered,
            unless calls have made them.
        excluded: names of attributes of roots that are not followed.
        keyed: further containers whose keys may be tensors.

    Attributes:
        roots: as passed.
        places: those that can be written.
        made_of_others: values that lead to tensors and must be made again, by ``id``.
        keyed: dictionaries and sets with tensors, or numbers that may be their ``id``,
            as keys.
        changed: the containers that have changed, in order.
        created: trained parameters that have come since.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        excluded: Collection[str] = (),
        *,
        keyed: Iterable[Any] = (),
    ) -> None:
        self.roots = roots
        self.changed: list[Any] = []
        self.created: list[nn.Parameter] = []
        self._excluded = excluded
        self._keyed = [container for container in keyed if isinstance(container, dict)]
        self._known = {id(root) for root in roots}
        self._groups = [_Group(root, excluded) for root in roots]
        # Those that are there already belong to others, such as the engine.
        for group in self._groups:
            for module in group.modules:
                self._known.update(map(id, module.modules()))
        self._collect()

    def update(self) -> bool:
        """Search again what has changed. Returns whether anything has."""
        groups: dict[int, _Group] = {}
        if not self._snapshot.unchanged():
            for number, container, _ in self._snapshot.changed():
                group = self._owners[number]
                groups[id(group)] = group
                self.changed.append(container)
        for place, group in self._variables:
            if place.read() is not place.value:
                groups[id(group)] = group
        if not groups:
            return False
        for group in groups.values():
            known = group.trained
            group.search()
            self.created += [
                group.trained[key] for key in group.trained.keys() - known.keys()
            ]
        self._add_modules(list(groups.values()))
        self._collect()
        return True

    def _add_modules(self, groups: list[_Group]) -> None:
        """Add the modules that calls have made to the roots."""
        for group in groups:  # which grow
            for module in group.modules:
                for part in module.modules():
                    if id(part) not in self._known:
                        self._known.add(id(part))
                        made = _Group(part, ())
                        groups.append(made)
                        self._groups.append(made)
                        self.created += made.trained.values()

    def _collect(self) -> None:
        """Join what the groups have found."""
        self.places: list[Place] = []
        self.made_of_others: dict[int, Any] = {}
        keyed = {id(container): container for container in self._keyed}
        containers: dict[int, Any] = {}
        self._owners: list[_Group] = []
        self._variables: list[tuple[Place, _Group]] = []
        shared: set[tuple[int, Any]] = set()
        for group in self._groups:
            self.places += group.places
            self.made_of_others |= group.made_of_others
            for container in group.keyed:
                keyed[id(container)] = container
            for container in group.containers:
                if id(container) not in containers:
                    containers[id(container)] = container
                    self._owners.append(group)
            for place in group.variables:
                key = id(place.holder), place.key
                if place.kind in _SHARED and key in shared:
                    continue
                shared.add(key)
                self._variables.append((place, group))
        self.keyed = list(keyed.values())
        self._snapshot = Snapshot(containers.values())


class _Group:
    """What one root leads to, without modules that are no part of it.

    Attributes: as those of ``KeptPlaces``, and
        modules: those to which the root leads.
        containers: those that it leads to, except long ones, which are data.
        variables: places that no container shows.
        trained: its parameters that require grad, by ``id``.
    """

    def __init__(self, root: Any, excluded: Collection[str]) -> None:
        self._root = root
        self._excluded = excluded
        self.search()

    def search(self) -> None:
        """Search again from the root on."""
        walk = Walk([self._root], excluded=self._excluded, enters_modules=False)
        self.modules: list[nn.Module] = walk.modules
        self.trained: dict[int, nn.Parameter] = {}
        for key, tensor in walk.tensors.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self.trained[key] = tensor
        parts = [place for place in walk.places if place.kind is PlaceKind.PART]
        self.made_of_others: dict[int, Any] = {}
        for value in walk.values:
            if isinstance(value, weakref.ref) and isinstance(value(), Tensor):
                self.made_of_others[id(value)] = value
        leading = {*walk.tensors, *walk.weights, *self.made_of_others}
        # Again, because a tuple may be part of another that was found before it.
        size = -1
        while size != len(leading):
            size = len(leading)
            for place in reversed(parts):
                if id(place.value) in leading:
                    parent = walk.values[place.parent]
                    leading.add(id(parent))
                    self.made_of_others[id(parent)] = parent
        self.places = [
            place
            for place in walk.places
            if place.is_writable and id(place.value) in leading
        ]
        containers = [container for *_, container in walk.containers]
        self.containers = [each for each in containers if len(each) <= MAX_ENTRIES]
        self.keyed = [each for each in containers if _has_keys(each)]
        self.variables = [place for place in walk.places if place.kind in VARIABLES]


def _has_keys(container: Any) -> bool:
    """Whether keys are tensors, or numbers that may be the ``id`` of one."""
    if not isinstance(container, (dict, set)) or len(container) > MAX_ENTRIES:
        return False
    kinds = {*map(type, container)}
    if kinds <= {str}:
        return False
    if int in kinds and max(key for key in container if type(key) is int) > (
        _LEAST_ADDRESS
    ):
        return True
    return any(issubclass(kind, Tensor) for kind in kinds)
