"""The places that lead to tensors, found once and kept between the calls of a step.

::

    kept = KeptPlaces([owner, *modules])
    …                       # calls
    kept.update()           # whether calls have written anything there

A search takes long beside a small call. So each root is searched by itself, and again
only if something in it has changed, which loops in C tell. To remember what many roots
have takes long, too, and calls change the same few each time, such as a counter of
their owner::

    still       roots that have not changed so far, joined once
    restless    those that have, joined again after each change

A module that calls have made is a root, too, and so are the modules inside of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
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
        groups = [_Group(root, excluded) for root in roots]
        # Those that are there already belong to others, such as the engine.
        for group in groups:
            for module in group.modules:
                self._known.update(map(id, module.modules()))
        self._still = _Joined(groups)
        self._restless = _Joined([])
        self._join()

    def update(self) -> bool:
        """Search again what has changed. Returns whether anything has."""
        groups: dict[int, _Group] = {}
        containers: dict[int, Any] = {}
        for joined in (self._still, self._restless):
            for container, owners in joined.changed_containers():
                containers[id(container)] = container
                groups |= {id(group): group for group in owners}
            for group in joined.groups_of_changed_variables():
                groups[id(group)] = group
        self.changed += containers.values()
        if not groups:
            return False
        for group in groups.values():
            known = group.trained
            group.search()
            self.created += [
                group.trained[key] for key in group.trained.keys() - known.keys()
            ]
        for made in self._groups_made(list(groups.values())):
            groups[id(made)] = made
        still = [group for group in self._still.groups if id(group) not in groups]
        if len(still) < len(self._still.groups):
            self._still = _Joined(still)
        groups |= {id(group): group for group in self._restless.groups}
        self._restless = _Joined(list(groups.values()))
        self._join()
        return True

    def _groups_made(self, groups: list[_Group]) -> list[_Group]:
        """Groups of the modules that calls have made, which are roots from now on."""
        created: list[_Group] = []
        for group in groups:  # which grow
            for module in group.modules:
                for part in module.modules():
                    if id(part) not in self._known:
                        self._known.add(id(part))
                        made = _Group(part, ())
                        groups.append(made)
                        created.append(made)
                        self.created += made.trained.values()
        return created

    def _join(self) -> None:
        """Join what all groups have found."""
        still = self._still
        restless = self._restless
        self.places = [*still.places, *restless.places]
        self.made_of_others = still.made_of_others | restless.made_of_others
        keyed = [*self._keyed, *still.keyed, *restless.keyed]
        self.keyed = list({id(container): container for container in keyed}.values())


class _Joined:
    """What some groups have found, and what has changed of it since.

    Attributes: as those of ``KeptPlaces``, and
        groups: those that have found it.
    """

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups = groups
        self.places: list[Place] = []
        self.made_of_others: dict[int, Any] = {}
        self.keyed: list[Any] = []
        containers: dict[int, Any] = {}
        owners: dict[int, list[_Group]] = {}
        variables: dict[Any, tuple[Place, list[_Group]]] = {}
        for group in groups:
            self.places += group.places
            self.made_of_others |= group.made_of_others
            self.keyed += group.keyed
            for container in group.containers:
                containers[id(container)] = container
                owners.setdefault(id(container), []).append(group)
            for place in group.variables:
                key: Any = id(place)
                if place.kind in _SHARED:  # many roots lead to the same
                    key = id(place.holder), place.key
                variables.setdefault(key, (place, []))[1].append(group)
        self._variables = list(variables.values())
        # By the number of a container, the groups that lead to it.
        self._owners = list(owners.values())
        self._snapshot = Snapshot(containers.values())

    def changed_containers(self) -> Iterator[tuple[Any, list[_Group]]]:
        """Yield the containers that have changed, with the groups that lead to them."""
        if not self._snapshot.unchanged():
            for number, container, _ in self._snapshot.changed():
                yield container, self._owners[number]

    def groups_of_changed_variables(self) -> Iterator[_Group]:
        """Yield the groups that lead to variables that have changed."""
        for place, groups in self._variables:
            if place.read() is not place.value:
                yield from groups


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
        self.trained = _trained_parameters(walk)
        self.made_of_others = _made_of_others(walk)
        leading = {*walk.tensors, *walk.weights, *self.made_of_others}
        self.places = [
            place
            for place in walk.places
            if place.is_writable and id(place.value) in leading
        ]
        containers = [container for *_, container in walk.containers]
        self.containers = [each for each in containers if len(each) <= MAX_ENTRIES]
        self.keyed = [each for each in containers if _has_keys(each)]
        self.variables = [place for place in walk.places if place.kind in VARIABLES]


def _trained_parameters(walk: Walk) -> dict[int, nn.Parameter]:
    """The parameters that require grad, by ``id``."""
    trained: dict[int, nn.Parameter] = {}
    for key, tensor in walk.tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            trained[key] = tensor
    return trained


def _made_of_others(walk: Walk) -> dict[int, Any]:
    """Values that lead to tensors and must be made again, by ``id``.

    Weak references to tensors, and what has a tensor or one of these as a part. ::

        value                      leads to a tensor by
        partial(f, (w,))           its argument, a tuple
        (w,)                       its entry, a parameter
    """
    made: dict[int, Any] = {}
    for value in walk.values:
        if isinstance(value, weakref.ref) and isinstance(value(), Tensor):
            made[id(value)] = value
    leading = {*walk.tensors, *walk.weights, *made}
    parts = [place for place in walk.places if place.kind is PlaceKind.PART]
    found_more = True
    while found_more:
        size = len(leading)
        # The last first: a walk finds a value before its parts, unless another value
        # has led to these.
        for place in reversed(parts):
            if id(place.value) in leading:
                whole = walk.values[place.parent]
                leading.add(id(whole))
                made[id(whole)] = whole
        found_more = len(leading) > size
    return made


def _has_keys(container: Any) -> bool:
    """Whether keys are tensors, or numbers that may be the ``id`` of one."""
    if not isinstance(container, (dict, set)) or len(container) > MAX_ENTRIES:
        return False
    kinds = {*map(type, container)}
    if kinds <= {str}:
        return False
    numbers = [key for key in container if type(key) is int]
    if max(numbers, default=0) > _LEAST_ADDRESS:
        return True
    return any(issubclass(kind, Tensor) for kind in kinds)
