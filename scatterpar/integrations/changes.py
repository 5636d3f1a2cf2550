"""What each call of a step function adds to what its owner keeps.

A step function writes into objects that its owner, such as a Trainer, keeps::

    self.losses.append(loss)          entries are appended, in the order of the rows
    self.by_loader[0].append(loss)    also in containers in containers, and in objects
    self.seen |= {1, 2}               elements are added
    self.all = torch.cat([self.all, rows])          also to arrays, tuples and texts
    self.total += loss                the sum of what the calls have added
    self.calls = getattr(self, "calls", 0) + 1      also a sum that has no value yet
    self.last = loss                  set, not added (``Statements`` tells them apart):
                                      the same in all calls, or told once, and the
                                      owner's value stays

A call gets copies (``CallCopies``). What it has changed in them is recorded as a list
of ``Change`` (``KeptState``). After the step the changes of all calls are applied to
the owner's own objects (``apply_changes``). Changes of a look are dropped.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor

from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.integrations import growth
from scatterpar.integrations.kept import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_ENTRIES,
    MAX_OBJECTS,
    Attribute,
    CallCopies,
    Entry,
    Path,
    holder_of,
    is_container,
    is_object,
    kept_attributes,
)
from scatterpar.integrations.loop import moved
from scatterpar.integrations.statements import Statements
from scatterpar.replicas.snapshot import is_same, refill


class ChangeKind(enum.Enum):
    """How a call has changed a value."""

    APPENDED = "entries were appended"
    ELEMENTS = "elements were added"
    DIFFERENCE = "a number or tensor was added"
    CREATED = "there was no value before"
    SUM = "a number or tensor was added to what does not show"
    REPLACED = "anything else"


# Kinds of changes whose value is that of the place, not what was added to it.
_VALUES = {ChangeKind.CREATED, ChangeKind.SUM, ChangeKind.REPLACED}


@dataclass(frozen=True)
class Change:
    """A change that one call has made.

    Attributes:
        path: the place of what has changed.
        kind: how it has changed.
        value: what the call has added or set.
        start: what a sum begins with, if there was no value before.
    """

    path: Path
    kind: ChangeKind
    value: Any
    start: Any = None


@contextlib.contextmanager
def standing_in(
    owner: Any,
    excluded: Container[str],
    copies: CallCopies,
    attributes: Mapping[str, Any],
    *,
    in_place: bool,
) -> Iterator[Any]:
    """Yields an object that stands for ``owner`` in one call: a copy, or itself.

    It has copies of what the owner keeps, and other ``attributes``. Afterwards the
    owner is as before, and so are the pinned objects that it shares with the copy.
    """
    pinned_state = KeptState(owner, excluded) if copies.pinned else None
    own_attributes = dict(vars(owner))
    stand_in = owner if in_place else copy.copy(owner)
    try:
        for name, value in kept_attributes(owner, excluded).items():
            vars(stand_in)[name] = copies.of(value)
        vars(stand_in).update(attributes)
        yield stand_in
    finally:
        if pinned_state is not None:
            pinned_state.restore()
        if in_place:
            vars(owner).clear()
            vars(owner).update(own_attributes)


class KeptState:
    """The contents of containers, objects and small tensors, before a call.

    Args:
        owner: the object whose attributes are compared.
        excluded: names of attributes that are not compared.
        statements: tell whether calls add to a number or tensor, or set it.
    """

    def __init__(
        self,
        owner: Any,
        excluded: Container[str],
        statements: Statements | None = None,
    ) -> None:
        self._owner = owner
        self._excluded = excluded
        self._statements = statements
        self._saved: dict[int, tuple[Any, Any]] = {}  # objects and their contents
        # Arrays, their versions, and their values. NumPy counts no versions.
        self._arrays: dict[int, tuple[Any, int, Any]] = {}
        self._attributes = kept_attributes(owner, excluded)
        self._save_entries(self._attributes.values(), 0)

    def _save_entries(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if not isinstance(value, PLAIN_CLASSES) and id(value) not in self._saved:
                self._save(value, depth)

    def _save(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if type(value) is Tensor and value.numel() <= MAX_ELEMENTS:
                version = -1 if value.is_inference() else value._version
                self._arrays[id(value)] = value, version, value.detach().clone()
            return
        if type(value) is numpy.ndarray:
            if value.size <= MAX_ELEMENTS:
                self._arrays[id(value)] = value, -1, value.copy()
            return
        contents = _contents(value)
        if contents is None or depth > MAX_DEPTH or len(self._saved) > MAX_OBJECTS:
            return
        self._saved[id(value)] = value, contents
        if len(contents) <= MAX_ENTRIES and not isinstance(contents, set):
            is_mapping = isinstance(contents, dict)
            entries = contents.values() if is_mapping else contents
            self._save_entries(entries, depth + 1)

    def changes(self) -> list[Change]:
        """What has changed since, attribute by attribute."""
        changes: list[Change] = []
        now = kept_attributes(self._owner, self._excluded)
        compared: set[int] = set()
        before = _with_class_values(self._attributes, type(self._owner), now)
        self._compare_mappings((), before, now, Attribute, changes, compared)
        return changes

    def restore(self) -> None:
        """Restore the contents of containers and objects that have changed."""
        for value, contents in self._saved.values():
            live = value if is_container(value) else vars(value)
            if not is_same(live, contents):
                live.clear()
                refill(live, contents)

    def _compare(
        self,
        path: Path,
        before: Any,
        now: Any,
        changes: list[Change],
        compared: set[int],
    ) -> None:
        """Add to ``changes`` how a value was replaced, or what was added to it."""
        if isinstance(now, PLAIN_CLASSES) and now is before:
            return
        if isinstance(before, (Tensor, numpy.ndarray)) and now is before:
            if id(now) not in compared:  # added once, whatever else refers to it
                compared.add(id(now))
                self._compare_values(path, before, changes)
            return
        _, contents = self._saved.get(id(before), (None, None))
        if now is before and (contents is None or id(now) in compared):
            return
        compared.add(id(now))
        if contents is not None and type(now) is type(before):
            self._compare_contents(path, contents, now, changes, compared)
        elif before is None and now is not None:
            self._add_created(path, now, changes, compared)
        else:
            changes += self._difference(path, before, now)

    def _add_created(
        self, path: Path, value: Any, changes: list[Change], compared: set[int]
    ) -> None:
        """Add to ``changes`` that a call has made a value where there was none."""
        if self._appends(path, value):
            changes.append(Change(path, ChangeKind.APPENDED, value))
        elif self._statements is not None and _is_summable(value):
            changes.append(_first_value(path, value, self._statements))
        elif isinstance(value, dict) and len(value) <= MAX_ENTRIES:
            # Its entries may be sums. So they are changes of their own.
            empty = copy.copy(value)
            empty.clear()
            changes.append(Change(path, ChangeKind.CREATED, empty))
            self._compare_mappings(path, {}, value, Entry, changes, compared)
        else:
            changes.append(Change(path, ChangeKind.CREATED, value))

    def _appends(self, path: Path, value: Any) -> bool:
        """Whether a statement appends to a value like this at ``path``."""
        is_text = isinstance(value, (tuple, str))
        if self._statements is None or not (is_text or growth.is_array(value)):
            return False
        if is_text and self._statements.adds(path):
            return True
        return self._statements.appends(path)

    def _compare_values(self, path: Path, array: Any, changes: list[Change]) -> None:
        """Compare an array with its earlier values: it may be written in place."""
        if id(array) not in self._arrays:
            return
        _, version, values = self._arrays[id(array)]
        if version == -1 or array._version != version:
            changes += self._difference(path, values, array)

    def _difference(self, path: Path, before: Any, now: Any) -> list[Change]:
        """The change of a value to another one: what was added, or the new value."""
        if growth.is_equal(before, now):
            return []
        piece = growth.appended(before, now, is_said=self._appends(path, now))
        if piece is not None:
            return [Change(path, ChangeKind.APPENDED, piece)]
        if type(before) is type(now) is frozenset and before <= now:
            return [Change(path, ChangeKind.ELEMENTS, now - before)]
        changes = _difference(path, before, now)
        if not changes or self._statements is None:
            return changes
        if changes[0].kind is ChangeKind.DIFFERENCE and self._statements.sets(path):
            return [Change(path, ChangeKind.REPLACED, now)]
        if _are_alike(before, now) and self._statements.adds(path):
            difference = _detached(now) - _detached(before)
            return [Change(path, ChangeKind.DIFFERENCE, difference)]
        return changes

    def _compare_contents(
        self,
        path: Path,
        before: Any,
        now: Any,
        changes: list[Change],
        compared: set[int],
    ) -> None:
        if isinstance(now, dict):
            self._compare_mappings(path, before, now, Entry, changes, compared)
        elif isinstance(now, set):
            if not before <= now:
                changes.append(Change(path, ChangeKind.REPLACED, now))
            elif len(now) > len(before):
                changes.append(Change(path, ChangeKind.ELEMENTS, now - before))
        elif is_container(now):
            self._compare_lists(path, before, now, changes, compared)
        else:
            attributes = vars(now)
            before = _with_class_values(before, type(now), attributes)
            self._compare_mappings(
                path, before, attributes, Attribute, changes, compared
            )

    def _compare_mappings(
        self,
        path: Path,
        before: Mapping[Any, Any],
        now: Mapping[Any, Any],
        part: Callable[[Any], Attribute | Entry],
        changes: list[Change],
        compared: set[int],
    ) -> None:
        for key, value in now.items():
            if key in before:
                if value is not before[key] or len(now) <= MAX_ENTRIES:
                    entry_path = (*path, part(key))
                    self._compare(entry_path, before[key], value, changes, compared)
            else:
                self._add_created((*path, part(key)), value, changes, compared)
        for key in before:
            if key not in now:
                changes.append(Change((*path, part(key)), ChangeKind.REPLACED, None))

    def _compare_lists(
        self,
        path: Path,
        before: list[Any],
        now: Any,
        changes: list[Change],
        compared: set[int],
    ) -> None:
        if len(now) == len(before) and isinstance(now, list):
            for number, entry in enumerate(now):
                if entry is not before[number] or len(now) <= MAX_ENTRIES:
                    entry_path = (*path, Entry(number))
                    self._compare(entry_path, before[number], entry, changes, compared)
            return
        kept = _num_kept(before, now)
        if kept is None:
            changes.append(Change(path, ChangeKind.REPLACED, now))
            return
        if isinstance(now, list) and kept <= MAX_ENTRIES:  # the entries before
            for number, entry in enumerate(before):
                entry_path = (*path, Entry(number))
                self._compare(entry_path, entry, now[number], changes, compared)
        appended = list(now)[kept:]
        if appended:
            changes.append(Change(path, ChangeKind.APPENDED, appended))


def _with_class_values(
    before: Mapping[str, Any], kind: type, now: Mapping[str, Any]
) -> Mapping[str, Any]:
    """``before`` with the values of new attributes that their class has.

    As after ``self.calls += 1``, if ``calls = 0`` is in the class's body.
    """
    new = [name for name in now if name not in before]
    if not new:
        return before
    values = dict(before)
    for name in new:
        value = getattr(kind, name, None)
        if hasattr(kind, name) and type(value) in (int, float, type(None)):
            values[name] = value
    return values


def _contents(value: Any) -> Any:
    """A copy of what a container or object holds; ``None`` for any other value."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, (list, deque)):
        return list(value)
    return dict(vars(value)) if is_object(value) else None


def _num_kept(before: list[Any], now: Any) -> int | None:
    """How many entries at the beginning of ``now`` are from ``before``.

    ``None`` if they are not the first, or for a full deque the last, of ``before``.
    """
    entries = list(now)
    first = 0
    if isinstance(now, deque) and now.maxlen is not None:
        # A full deque drops entries on the left for those that are appended.
        while not _begins_with(entries, before[first:]):
            first += 1
    kept = before[first:]
    return len(kept) if _begins_with(entries, kept) else None


def _begins_with(entries: list[Any], beginning: list[Any]) -> bool:
    if len(entries) < len(beginning):
        return False
    return all(map(is_, entries[: len(beginning)], beginning))


def _first_value(path: Path, value: Any, statements: Statements) -> Change:
    """The change to a number or tensor at ``path``, where there was no value."""
    start = statements.start_of(path)
    if start is not None:
        return Change(path, ChangeKind.DIFFERENCE, _detached(value) - start, start)
    if statements.adds(path):
        return Change(path, ChangeKind.SUM, value)
    if type(value) in (int, float) and statements.sets(path):
        return Change(path, ChangeKind.REPLACED, value)
    return Change(path, ChangeKind.CREATED, value)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_summable(value: Any) -> bool:
    """Whether ``value`` is a number, or an array of numbers."""
    if type(value) is Tensor:
        return value.dtype != torch.bool and value.numel() <= MAX_ELEMENTS
    if type(value) is numpy.ndarray:
        is_number = numpy.issubdtype(value.dtype, numpy.number)
        return bool(is_number and value.size <= MAX_ELEMENTS)
    return growth.is_number(value)


def _are_alike(before: Any, now: Any) -> bool:
    """Whether these are arrays of numbers, of one class, shape and dtype."""
    if type(before) is not type(now) or not growth.is_array(now):
        return False
    is_alike = before.shape == now.shape and before.dtype == now.dtype
    return is_alike and _is_summable(now)


def _difference(path: Path, before: Any, now: Any) -> list[Change]:
    """The change of a number or tensor to another one, or of anything else."""
    if growth.is_number(before) and growth.is_number(now):
        if now == before:
            return []
        return [Change(path, ChangeKind.DIFFERENCE, now - before)]
    # Of larger tensors, calls may have set some entries, such as those of a queue.
    is_summed = isinstance(before, Tensor) or type(before) in (int, float)
    if type(now) is Tensor and is_summed and not now.ndim and now.dtype != torch.bool:
        earlier = before.detach() if isinstance(before, Tensor) else before
        if not isinstance(earlier, Tensor) or not earlier.ndim:
            return [Change(path, ChangeKind.DIFFERENCE, now.detach() - earlier)]
    if isinstance(now, PLAIN_CLASSES) and type(now) is type(before) and now == before:
        return []
    return [Change(path, ChangeKind.REPLACED, now)]


def apply_changes(
    owner: Any,
    calls: Sequence[Sequence[Change]],
    device: torch.device,
    tell: Callable[[str], object],
    owner_name: str = "self",
) -> None:
    """Apply to ``owner`` the changes of all calls of one step, in the order of calls.

    Tensors are moved to ``device``. Changes that cannot be added up are dropped, unless
    there was one call: ``tell`` gets the place of each, such as ``"self.last"``.
    """
    by_path: dict[Path, list[Change]] = defaultdict(list)
    for changes in calls:
        for change in changes:
            by_path[change.path].append(change)
    for path, changes_there in by_path.items():
        part = path[-1]
        values = [moved(change.value, device) for change in changes_there]
        kinds = [change.kind for change in changes_there]
        are_values = kinds[0] in _VALUES
        try:
            holder = holder_of(owner, path)
            if len(calls) == 1 and are_values:
                part.write(holder, values[0])
            elif set(kinds) == {ChangeKind.CREATED}:
                part.write(holder, _one_of(values, holder))
            elif set(kinds) == {ChangeKind.REPLACED}:
                part.write(holder, _same_of(values))
            else:
                start = changes_there[0].start
                _add(holder, part, kinds, values, moved(start, device))
        except (_NotAdditive, LookupError, TypeError, AttributeError):
            tell(owner_name + "".join(map(str, path)))


def names_of(calls: Iterable[Iterable[Change]]) -> set[str]:
    """The names of the owner's attributes that calls have changed, also inside."""
    names: set[str] = set()
    for changes in calls:
        for change in changes:
            if isinstance(change.path[0], Attribute):
                names.add(change.path[0].name)
    return names


class _NotAdditive(Exception):
    """What calls have set at one place cannot become one value."""


def _add(
    holder: Any,
    part: Attribute | Entry,
    kinds: Sequence[ChangeKind],
    values: Sequence[Any],
    start: Any,
) -> None:
    """Add what calls have added to the value at ``part`` of ``holder``.

    ``start`` is the value before, if there is none.
    """
    try:
        target = part.read(holder)
    except (LookupError, AttributeError):
        target = None
    if target is None:
        if start is None and set(kinds) != {ChangeKind.APPENDED}:
            raise _NotAdditive
        target = start
    for kind, value in zip(kinds, values, strict=True):
        if kind is ChangeKind.APPENDED and is_container(target):
            target.extend(value)
        elif kind is ChangeKind.APPENDED:
            target = growth.extended(target, value)
            part.write(holder, target)
        elif kind is ChangeKind.ELEMENTS and isinstance(target, frozenset):
            target |= value
            part.write(holder, target)
        elif kind is ChangeKind.ELEMENTS:
            target.update(value)
        elif kind is ChangeKind.DIFFERENCE:
            target = _sum(target, value)
            part.write(holder, target)
        else:
            raise _NotAdditive


def _sum(target: Any, value: Any) -> Any:
    is_plain = isinstance(target, Tensor) and not target.requires_grad
    if not is_plain or target.is_inference() or not isinstance(value, Tensor):
        return target + value
    if not torch.can_cast(value.dtype, target.dtype):
        return target + value
    return target.add_(value.to(target.device))  # in place: others may refer to it


def _same_of(values: Sequence[Any]) -> Any:
    """The number, text, switch or tensor that all calls have set."""
    first, *others = values
    if first is None or not isinstance(first, (*PLAIN_CLASSES, Tensor)):
        raise _NotAdditive
    if not all(growth.is_equal(first, other) for other in others):
        raise _NotAdditive
    return first


def _one_of(values: Sequence[Any], holder: Any) -> Any:
    """One value where there was none: the same in all calls, or joined containers."""
    first, *others = values
    if _counts(holder) and all(map(growth.is_number, values)):
        return sum(values)
    if not is_container(first):
        return _same_of(values)
    if any(type(other) is not type(first) for other in others):
        raise _NotAdditive
    if isinstance(first, set):
        return first.union(*others)
    if not isinstance(first, dict):
        for other in others:
            first.extend(other)
        return first
    for key in dict.fromkeys(key for value in values for key in value):
        first[key] = _one_of([value[key] for value in values if key in value], first)
    return first


def _counts(holder: Any) -> bool:
    """Whether a missing entry of a mapping counts as zero."""
    factory = getattr(holder, "default_factory", None)
    return isinstance(holder, Counter) or factory in (int, float)
