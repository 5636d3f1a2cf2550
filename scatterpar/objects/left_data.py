"""Data that calls have left in the user's containers, and its copies, as left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from scatterpar.batch.nested import PLAIN
from scatterpar.devices.write_counters import versions
from scatterpar.objects.references import MUTABLE_CONTAINERS
from scatterpar.objects.snapshot import Snapshot, entries_of


class LeftData:
    """Values that the replicas do not follow, because no build has found them."""

    def __init__(self) -> None:
        self._values: dict[int, list[Any]] = {}  # by the number of their container
        self._copies: Mapping[int, Sequence[Any]] = {}  # by the ``id`` of the value
        self._containers = Snapshot([])
        self._tensors: Sequence[Tensor] = ()
        self._versions: Sequence[int] = ()

    def is_as_left(self) -> bool:
        """Whether nobody has written these values, or copies of them, since the last
        ``remember``.
        """
        has_same_contents = self._containers.has_same_contents()
        return has_same_contents and versions(self._tensors) == self._versions

    def remember(
        self,
        changes: Sequence[tuple[int, Any, Any]],
        copies: Mapping[int, Sequence[Any]],
    ) -> None:
        """Remember what was left in these containers, and how it is now.

        Each comes with its number, and with what it had before. ``copies`` are those of
        new values, by ``id``.
        """
        for number, container, saved in changes:
            earlier = self._values.get(number, ())
            self._values[number] = _left_in(container, saved, earlier)
        left = list(chain.from_iterable(self._values.values()))
        known_copies = {**self._copies, **copies}
        self._copies = {id(value): known_copies.get(id(value), ()) for value in left}
        self._watch([*left, *chain.from_iterable(self._copies.values())])

    def _watch(self, values: Sequence[Any]) -> None:
        parts = list(_with_parts(values))
        containers = [part for part in parts if type(part) in MUTABLE_CONTAINERS]
        self._containers = Snapshot(containers)
        self._tensors = [part for part in parts if isinstance(part, Tensor)]
        self._versions = versions(self._tensors)


def _left_in(container: Any, saved: Any, earlier: Sequence[Any]) -> list[Any]:
    """What a container has, and what no build has found there: all that is new beside
    ``saved``, and what was left ``earlier``.
    """
    built = {id(value) for _, value in entries_of(saved)} - set(map(id, earlier))
    return [
        value
        for _, value in entries_of(container)
        if type(value) not in PLAIN and id(value) not in built
    ]


def _with_parts(values: Any) -> Iterator[Any]:
    """Values, and what the containers among them consist of."""
    for value in values:
        yield value
        if type(value) in (*MUTABLE_CONTAINERS, tuple):
            yield from _with_parts(value for _, value in entries_of(value))
