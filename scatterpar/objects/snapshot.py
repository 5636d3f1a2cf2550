"""The contents of a module's containers, remembered: what was rebound since then?"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain, islice, starmap
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from scatterpar.batch.nested import PLAIN
from scatterpar.torch_private.compiler import PREFIX_OF_COMPILER

_CONTAINERS_OF_VALUES = {
    dict,
    list,
    tuple,
    set,
    OrderedDict,
    defaultdict,
    Counter,
    deque,
}
# The first that a container is an instance of counts.
_WRITABLE = OrderedDict, dict, set, list, deque
_SWITCHES = {bool, str, bytes, types.NoneType}


class ValueChange(NamedTuple):
    """A plain value that was replaced by another one.

    Attributes:
        container: the number of the dictionary.
        position: that of the key, which may be a module: the replica's dictionary has
            the replica's module there.
        key: as it is in the user's dictionary.
        value: the new one.
    """

    container: int
    position: int
    key: Any
    value: Any


class Snapshot:
    """The contents of some containers, by identity, and ``facts``; detects any change
    of them.

    The comparison runs in C loops: a tree of 287 modules has eight thousand entries. It
    reads all of them, because no Python API reports reliably which dictionaries were
    written.
    """

    def __init__(
        self, containers: Iterable[Any], facts: Callable[[], list[Any]] = list
    ) -> None:
        self._facts = facts
        self._known = facts()
        self._containers = list(containers)
        self._saved: list[Any] = []
        for container in self._containers:
            is_dict = isinstance(container, dict)
            self._saved.append(dict(container) if is_dict else list(container))
        self._remember()

    def _remember(self) -> None:
        """Sort the saved contents for ``unchanged``.

        The dictionaries with names as keys are nearly all, and can be compared as one:
        their keys by ``==``, their values by identity.
        """
        self._sizes: list[int] = []
        self._filled: list[Any] = []
        # Most are empty, such as the ``__dict__`` of each tensor: as truths, because
        # lengths take three times as long.
        self._empty: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._others: list[tuple[Any, Any]] = []
        for container, saved in zip(self._containers, self._saved, strict=True):
            if not saved:
                self._empty.append(container)
                continue
            self._filled.append(container)
            self._sizes.append(len(saved))
            # Keys may be tensors, whose ``==`` is no answer.
            if type(container) is dict and {str}.issuperset(map(type, saved)):
                self._dicts.append(container)
                self._names += saved
                self._values += saved.values()
            else:
                self._others.append((container, saved))

    def unchanged(self) -> bool:
        """Whether every container holds the same objects under the same keys."""
        return self.has_same_contents() and self._facts() == self._known

    def has_same_contents(self) -> bool:
        """As ``unchanged``, whatever the facts are."""
        # First: the flat lists below do not show where one dictionary ends.
        if any(self._empty) or list(map(len, self._filled)) != self._sizes:
            return False
        if list(chain.from_iterable(self._dicts)) != self._names:
            return False
        values = chain.from_iterable(map(dict.values, self._dicts))
        if not all(map(is_, values, self._values)):
            return False
        return all(starmap(is_same, self._others))

    def flags(self) -> int:
        """A hash of the values that may be switches: strings, booleans, bytes and
        ``None``.
        """
        return hash(tuple(value for value in self._values if type(value) in _SWITCHES))

    def changed(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield number, container and saved contents of each that has changed."""
        pairs = zip(self._containers, self._saved, strict=True)
        for number, (container, saved) in enumerate(pairs):
            # Most containers are empty: hooks of modules.
            if (container or saved) and not is_same(container, saved):
                yield number, container, saved

    def restore(self) -> None:
        """Restore the contents of the containers.

        What torch's compiler has set stays: it would compile again without it.
        """
        for _, container, saved in self.changed():
            if isinstance(saved, dict):
                for key, value in container.items():
                    if isinstance(key, str) and key.startswith(PREFIX_OF_COMPILER):
                        saved[key] = value
            refill(container, saved)
        self._known = self._facts()
        self._remember()

    def value_changes(self) -> list[ValueChange] | None:
        """The plain values that were replaced by plain values.

        Returns ``None`` if anything else has changed.
        """
        changes: list[ValueChange] = []
        for number, container, saved in self.changed():
            # By identity: keys may be tensors.
            if not isinstance(saved, dict) or not is_same([*container], [*saved]):
                return None
            pairs = zip(container.items(), saved.values(), strict=True)
            for position, ((key, value), earlier) in enumerate(pairs):
                if value is earlier:
                    continue
                if not {type(value), type(earlier)} <= PLAIN:
                    return None
                changes.append(ValueChange(number, position, key, value))
        return changes if self._facts() == self._known else None

    def new_data(self, registries: Container[int]) -> list[tuple[int, Any, Any]] | None:
        """Number, container and saved contents of each in which data was written.

        Returns ``None`` if anything else was written, such as a module, or something in
        ``registries``, by ``id``.
        """
        if self._facts() != self._known:
            return None
        changes: list[tuple[int, Any, Any]] = []
        for number, container, saved in self.changed():
            if id(container) in registries:
                return None
            before = dict(entries_of(saved))
            after = dict(entries_of(container))
            for entries, others in ((before, after), (after, before)):
                for key, value in entries.items():
                    is_same_value = key in others and others[key] is value
                    if not is_same_value and not consists_of_values(value):
                        return None
            changes.append((number, container, saved))
        return changes

    def accept(self) -> None:
        """Remember the present contents."""
        for number, container, _ in list(self.changed()):
            is_dict = isinstance(container, dict)
            self._saved[number] = dict(container) if is_dict else list(container)
        self._known = self._facts()
        self._remember()

    def apply_changes(self, changes: Iterable[ValueChange]) -> None:
        """Replace plain values in the containers and in their remembered contents."""
        for change in changes:
            container = self._containers[change.container]
            key = change.key
            # Names may be in another order in a replica.
            if type(key) not in PLAIN:
                key = next(islice(container, change.position, None))
            container[key] = change.value
            self._saved[change.container][key] = change.value
        self._remember()


def consists_of_values(value: Any) -> bool:
    """Whether a value consists of plain values and tensors, without parameters."""
    if type(value) in PLAIN:
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) not in _CONTAINERS_OF_VALUES:
        return False
    entries = value.values() if isinstance(value, dict) else value
    return all(map(consists_of_values, entries))


def is_same(container: Any, saved: Any) -> bool:
    """Whether a container has the same objects, in order, as a copy of it."""
    if len(container) != len(saved) or not all(map(is_, container, saved)):
        return False
    if not isinstance(saved, dict):
        return True
    return all(map(is_, container.values(), saved.values()))


def entries_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """The keys or positions in a container, with the values there."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def refill(container: Any, items: Any) -> None:
    """Make ``items`` the contents of a container, those of a dictionary a dictionary.

    By the methods of Python's own class: those of a subclass may do more, or refuse.
    """
    base: Any = next(kind for kind in _WRITABLE if isinstance(container, kind))
    base.clear(container)
    if base is OrderedDict:  # its ``update`` calls the subclass for each entry
        for key, value in items.items():
            base.__setitem__(container, key, value)
    elif base in (dict, set):
        base.update(container, items)
    else:
        base.extend(container, items)
