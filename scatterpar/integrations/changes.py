"""What each call of a step function adds to what its owner keeps.

A step function writes into objects that its owner, such as a Trainer, keeps::

    self.losses.append(loss)          entries are appended, in the order of the rows
    self.by_loader[0].append(loss)    also in containers in containers, and in objects
    self.seen |= {1, 2}               elements are added
    self.all = torch.cat([self.all, rows])          also to arrays, tuples and texts
    self.total += loss                the sum of what the calls have added
    self.last = text                  set, not added: the same in all calls, or told
                                      once, and the owner's value stays

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
from scatterpar.replicas.snapshot import is_same, refill


class ChangeKind(enum.Enum):
    """How a call has changed a value."""

    APPENDED = "entries were appended"
    ELEMENTS = "elements were added"
    DIFFERENCE = "a number or tensor was added"
    CREATED = "there was no value before"
    REPLACED = "anything else"


# Kinds of changes whose value is that of the place, not what was added to it.
_VALUES = {ChangeKind.CREATED, ChangeKind.REPLACED}


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
    """

    def __init__(self, owner: Any, excluded: Container[str]) -> None:
        self._owner = owner
        self._excluded = excluded
        self._saved = _Saved()
        self._attributes = kept_attributes(owner, excluded)
        self._saved.add_all(self._attributes.values(), 0)

    def changes(self) -> list[Change]:
        """What has changed since, attribute by attribute."""
        after = kept_attributes(self._owner, self._excluded)
        before = _with_class_values(self._attributes, type(self._owner), after)
        comparison = _Comparison(self._saved)
        comparison.compare_mappings((), before, after, Attribute)
        return comparison.changes

    def restore(self) -> None:
        """Restore the contents of containers and objects that have changed."""
        for value, contents in self._saved.contents.values():
            live = value if is_container(value) else vars(value)
            if not is_same(live, contents):
                live.clear()
                refill(live, contents)


class _Saved:
    """What containers, objects and small arrays held, by their ``id``.

    Attributes:
        contents: containers and objects, each with a copy of what it held.
        arrays: tensors and arrays of NumPy, each with its version and its values. The
            version is -1 for NumPy's and for inference tensors, which have none.
    """

    def __init__(self) -> None:
        self.contents: dict[int, tuple[Any, Any]] = {}
        self.arrays: dict[int, tuple[Any, int, Any]] = {}

    def add_all(self, values: Iterable[Any], depth: int) -> None:
        """Save values, and what is in them. They are ``depth`` containers deep."""
        for value in values:
            # Tensors first: they are no containers, whatever they have as attributes.
            if isinstance(value, Tensor):
                self._add_tensor(value)
            elif type(value) is numpy.ndarray:
                if value.size <= MAX_ELEMENTS:
                    self.arrays[id(value)] = (value, -1, value.copy())
            elif not isinstance(value, PLAIN_CLASSES):
                self._add(value, depth)

    def _add(self, value: Any, depth: int) -> None:
        is_known = id(value) in self.contents
        if is_known or depth > MAX_DEPTH or len(self.contents) > MAX_OBJECTS:
            return
        contents = _contents(value)
        if contents is None:
            return
        self.contents[id(value)] = (value, contents)
        if len(contents) > MAX_ENTRIES or isinstance(contents, set):
            return  # entries are compared by identity only
        is_mapping = isinstance(contents, dict)
        self.add_all(contents.values() if is_mapping else contents, depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        if type(tensor) is Tensor and tensor.numel() <= MAX_ELEMENTS:
            version = -1 if tensor.is_inference() else tensor._version
            values = tensor.detach().clone()
            self.arrays[id(tensor)] = (tensor, version, values)


class _Comparison:
    """Compares values with what was saved of them.

    Attributes:
        changes: the changes found so far.
    """

    def __init__(self, saved: _Saved) -> None:
        self.changes: list[Change] = []
        self._saved = saved
        self._compared: set[int] = set()  # ids, so that cycles end

    def compare_mappings(
        self,
        path: Path,
        before: Mapping[Any, Any],
        after: Mapping[Any, Any],
        part: Callable[[Any], Attribute | Entry],
    ) -> None:
        """Compare the entries of a mapping, or the attributes of an object.

        ``part`` makes a part of a path of a key.
        """
        is_searched = len(after) <= MAX_ENTRIES
        for key, value in after.items():
            if key not in before:
                self._add_created((*path, part(key)), value)
            elif is_searched or value is not before[key]:
                self._compare((*path, part(key)), before[key], value)
        for key in before:
            if key not in after:
                self._add((*path, part(key)), ChangeKind.REPLACED, None)

    def _add(self, path: Path, kind: ChangeKind, value: Any) -> None:
        self.changes.append(Change(path, kind, value))

    def _compare(self, path: Path, before: Any, after: Any) -> None:
        """Find how a value was replaced, or what was added to it."""
        if isinstance(after, PLAIN_CLASSES) and after is before:
            return
        if isinstance(before, (Tensor, numpy.ndarray)) and after is before:
            self._compare_in_place(path, before)
            return
        _, contents = self._saved.contents.get(id(before), (None, None))
        # The same object has changed only if its contents have.
        if after is before and (contents is None or id(after) in self._compared):
            return
        self._compared.add(id(after))
        if contents is not None and type(after) is type(before):
            self._compare_contents(path, contents, after)
        elif before is None:
            self._add_created(path, after)
        else:
            self._compare_values(path, before, after)

    def _compare_in_place(self, path: Path, array: Any) -> None:
        """Compare an array with its earlier values, if it may have been written."""
        if id(array) in self._compared:
            return  # added once, whatever else refers to it
        self._compared.add(id(array))
        if id(array) in self._saved.arrays:
            _, version, values = self._saved.arrays[id(array)]
            if version == -1 or array._version != version:
                self._compare_values(path, values, array)

    def _compare_values(self, path: Path, before: Any, after: Any) -> None:
        """Find what was added to a value, or its new value."""
        are_numbers = growth.is_number(before) and growth.is_number(after)
        if growth.is_equal(before, after) or (are_numbers and before == after):
            return
        appended = growth.appended(before, after, is_said=False)
        if appended is not None:
            self._add(path, ChangeKind.APPENDED, appended)
        elif type(before) is type(after) is frozenset and before <= after:
            self._add(path, ChangeKind.ELEMENTS, after - before)
        elif _are_numbers(before, after):
            difference = _detached(after) - _detached(before)
            self._add(path, ChangeKind.DIFFERENCE, difference)
        else:
            self._add(path, ChangeKind.REPLACED, after)

    def _add_created(self, path: Path, value: Any) -> None:
        """Add that a call has made a value where there was none."""
        if isinstance(value, dict) and len(value) <= MAX_ENTRIES:
            # Its entries may be sums. So they are changes of their own.
            empty = copy.copy(value)
            empty.clear()
            self._add(path, ChangeKind.CREATED, empty)
            self.compare_mappings(path, {}, value, Entry)
        else:
            self._add(path, ChangeKind.CREATED, value)

    def _compare_contents(self, path: Path, before: Any, after: Any) -> None:
        """Compare what a container or object held with what it holds."""
        if isinstance(after, dict):
            self.compare_mappings(path, before, after, Entry)
        elif isinstance(after, set):
            if not before <= after:
                self._add(path, ChangeKind.REPLACED, after)
            elif len(after) > len(before):
                self._add(path, ChangeKind.ELEMENTS, after - before)
        elif is_container(after):
            self._compare_lists(path, before, after)
        else:
            attributes = vars(after)
            before = _with_class_values(before, type(after), attributes)
            self.compare_mappings(path, before, attributes, Attribute)

    def _compare_lists(self, path: Path, before: list[Any], after: Any) -> None:
        """Find the entries that were appended to a list or deque."""
        is_searched = len(before) <= MAX_ENTRIES
        if isinstance(after, list) and len(after) == len(before):
            for number, entry in enumerate(before):
                if is_searched or after[number] is not entry:
                    self._compare((*path, Entry(number)), entry, after[number])
            return
        num_kept = _num_kept(before, after)
        if num_kept is None:
            self._add(path, ChangeKind.REPLACED, after)
            return
        if isinstance(after, list) and is_searched:
            for number, entry in enumerate(before):
                self._compare((*path, Entry(number)), entry, after[number])
        appended = list(after)[num_kept:]
        if appended:
            self._add(path, ChangeKind.APPENDED, appended)


def _with_class_values(
    before: Mapping[str, Any], kind: type, after: Mapping[str, Any]
) -> Mapping[str, Any]:
    """``before`` with the values of new attributes that their class has.

    As after ``self.calls += 1``, if ``calls = 0`` is in the class's body.
    """
    new_names = [name for name in after if name not in before]
    if not new_names:
        return before
    values = dict(before)
    for name in new_names:
        value = getattr(kind, name, None)
        # A property or a method of this name is no value.
        if type(value) in (int, float) or (value is None and hasattr(kind, name)):
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


def _num_kept(before: list[Any], after: Any) -> int | None:
    """How many entries at the beginning of ``after`` are from ``before``.

    ``None`` if they are not the first, or for a full deque the last, of ``before``.
    """
    entries = list(after)
    dropped = 0
    if isinstance(after, deque) and after.maxlen is not None:
        # A full deque drops entries on the left for those that are appended.
        while not _begins_with(entries, before[dropped:]):
            dropped += 1
    if not _begins_with(entries, before[dropped:]):
        return None
    return len(before) - dropped


def _begins_with(entries: list[Any], beginning: list[Any]) -> bool:
    """Whether the first entries are those of ``beginning``, by identity."""
    if len(entries) < len(beginning):
        return False
    return all(map(is_, entries[: len(beginning)], beginning))


def _detached(value: Any) -> Any:
    """A tensor without its graph; any other value itself."""
    return value.detach() if isinstance(value, Tensor) else value


def _are_numbers(before: Any, after: Any) -> bool:
    """Whether these are numbers, or tensors of one number, and may be added up."""
    if growth.is_number(before) and growth.is_number(after):
        return True
    # A tensor that has become a number was set.
    if type(after) is not Tensor or after.ndim or after.dtype == torch.bool:
        return False
    if isinstance(before, Tensor):
        return not before.ndim
    return type(before) in (int, float)


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
    for path, changes_of_path in by_path.items():
        try:
            _apply(owner, path, changes_of_path, len(calls), device)
        except (_NotAdditive, LookupError, TypeError, AttributeError):
            tell(owner_name + "".join(map(str, path)))


def _apply(
    owner: Any,
    path: Path,
    changes: Sequence[Change],
    num_calls: int,
    device: torch.device,
) -> None:
    """Apply the changes at one place.

    Raises:
        _NotAdditive: they cannot become one value.
        LookupError, TypeError, AttributeError: the owner has no such place, or a value
            there that nothing can be added to.
    """
    part = path[-1]
    holder = holder_of(owner, path)
    values = [moved(change.value, device) for change in changes]
    kinds = [change.kind for change in changes]
    # The only call has set what one call of the stock loop would have set.
    if num_calls == 1 and kinds[0] in _VALUES:
        part.write(holder, values[0])
    elif set(kinds) == {ChangeKind.CREATED}:
        part.write(holder, _one_of(values, holder))
    elif set(kinds) == {ChangeKind.REPLACED}:
        part.write(holder, _same_of(values))
    else:
        start = moved(changes[0].start, device)
        _add(holder, part, kinds, values, start)


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
            raise _NotAdditive  # there is nothing to add to
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
        else:  # some calls have added, others have set
            raise _NotAdditive


def _sum(target: Any, value: Any) -> Any:
    """The sum, in place if possible: other objects may refer to a tensor."""
    if not isinstance(target, Tensor) or not isinstance(value, Tensor):
        return target + value
    if target.requires_grad or target.is_inference():  # cannot be written
        return target + value
    if not torch.can_cast(value.dtype, target.dtype):
        return target + value
    return target.add_(value.to(target.device))


def _same_of(values: Sequence[Any]) -> Any:
    """The number, text, switch or tensor that all calls have set.

    Raises:
        _NotAdditive: the calls have set different values, or objects.
    """
    first = values[0]
    if first is None or not isinstance(first, (*PLAIN_CLASSES, Tensor)):
        raise _NotAdditive
    for value in values[1:]:
        if not growth.is_equal(first, value):
            raise _NotAdditive
    return first


def _one_of(values: Sequence[Any], holder: Any) -> Any:
    """One value where there was none: the same in all calls, or joined containers.

    Raises:
        _NotAdditive: there is no such value.
    """
    first = values[0]
    kinds = set(map(type, values))
    if _counts(holder) and all(map(growth.is_number, values)):
        return sum(values)
    if not is_container(first):
        return _same_of(values)
    if len(kinds) > 1:
        raise _NotAdditive
    if isinstance(first, dict):
        return _joined_dict(values)
    for value in values[1:]:
        if isinstance(first, set):
            first.update(value)
        else:
            first.extend(value)
    return first


def _joined_dict(values: Sequence[Any]) -> Any:
    """A dict with the entries of all; entries of one key become one value."""
    joined = values[0]
    keys: dict[Any, None] = {}
    for value in values:
        keys.update(dict.fromkeys(value))
    for key in keys:
        entries = [value[key] for value in values if key in value]
        joined[key] = _one_of(entries, joined)
    return joined


def _counts(holder: Any) -> bool:
    """Whether a missing entry of a mapping counts as zero."""
    factory = getattr(holder, "default_factory", None)
    return isinstance(holder, Counter) or factory in (int, float)
