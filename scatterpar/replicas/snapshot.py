"""The contents of a module's containers, remembered: what was rebound since then?"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress, starmap
from operator import is_
from typing import Any

from scatterpar.batch.nested import PLAIN_CLASSES

_SWITCHES = {bool, str, bytes, types.NoneType}
PLAIN = frozenset(PLAIN_CLASSES)

ValueChange = tuple[int, Any, Any]  # the number of a container, a key, the value there


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
        self._facts, self._known, self._containers = facts, facts(), list(containers)
        self._saved: list[Any]
        self._saved = [
            dict(c) if isinstance(c, dict) else list(c) for c in self._containers
        ]
        self._remember()

    def _remember(self) -> None:
        """Sort the saved contents for ``unchanged``."""
        self._sizes = list(map(len, self._saved))
        full = [
            pair for pair in zip(self._containers, self._saved, strict=True) if pair[1]
        ]
        named = [
            type(c) is dict and {str}.issuperset(map(type, saved)) for c, saved in full
        ]
        self._others = [
            pair for pair, is_named in zip(full, named, strict=True) if not is_named
        ]
        dicts = [*compress(full, named)]
        self._dicts = [container for container, _ in dicts]
        self._names = [name for _, saved in dicts for name in saved]
        self._values = [value for _, saved in dicts for value in saved.values()]

    def unchanged(self) -> bool:
        """Whether every container holds the same objects under the same keys."""
        return (
            list(map(len, self._containers)) == self._sizes
            and self._facts() == self._known
            and list(chain.from_iterable(self._dicts)) == self._names
            and all(
                map(
                    is_,
                    chain.from_iterable(map(dict.values, self._dicts)),
                    self._values,
                )
            )
            and all(starmap(is_same, self._others))
        )

    def flags(self) -> int:
        """A hash of the values that may be switches: strings, booleans, bytes and
        ``None``.
        """
        return hash(tuple(value for value in self._values if type(value) in _SWITCHES))

    def _changed(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield (number, container, saved contents) for each container that has
        changed.
        """
        for i, (container, saved) in enumerate(
            zip(self._containers, self._saved, strict=True)
        ):
            if (container or saved) and not is_same(container, saved):
                yield i, container, saved

    def restore(self) -> None:
        """Restore the contents of the containers, except attributes that torch's
        compiler sets.
        """
        for _, container, saved in self._changed():
            if isinstance(saved, dict):
                names = [key for key in container if isinstance(key, str)]
                saved |= {n: container[n] for n in names if n.startswith("_dynamo")}
            container.clear()
            refill(container, saved)
        self._known = self._facts()
        self._remember()

    def value_changes(self) -> list[ValueChange] | None:
        """The plain values that were replaced by others; ``None`` if anything else has
        changed.
        """
        changes = []
        for i, now, saved in self._changed():
            is_dict = isinstance(saved, dict)  # keys may be tensors: not compared by ==
            if not is_dict or len(now) != len(saved) or not all(map(is_, now, saved)):
                return None
            for key, value in now.items():
                if value is not saved[key]:
                    if not PLAIN.issuperset((type(value), type(saved[key]))):
                        return None
                    changes.append((i, key, value))
        return changes if self._facts() == self._known else None

    def apply_changes(self, changes: Iterable[ValueChange]) -> None:
        """Replace plain values in the containers and in their remembered contents."""
        for i, key, value in changes:
            self._containers[i][key] = self._saved[i][key] = value
        self._remember()


def is_same(container: Any, saved: Any) -> bool:
    """Whether a container has the same objects, in order, as a copy of it."""
    if len(container) != len(saved) or not all(map(is_, container, saved)):
        return False
    return not isinstance(saved, dict) or all(
        map(is_, container.values(), saved.values())
    )


def refill(container: Any, items: Any) -> None:
    """Add ``items`` to an empty container."""
    if isinstance(container, (dict, set)):
        container.update(items)
    else:
        container.extend(items)
