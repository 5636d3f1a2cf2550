"""Traverse and merge nested values.

Containers are tuples, lists, mappings, dataclasses, and caches of tensors. All else is
an atom: a tensor, a marker, a number, a text, an object. (A leaf is autograd's, a
tensor that accumulates a gradient.)

Methods of a user's tensor subclass are not called inside a generator, except to compare
bits: a ``StopIteration`` from such a method would become another error.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

# Classes of values that are told apart by ``==``, and refer to nothing.
PLAIN_CLASSES = (bool, int, float, complex, str, bytes, types.NoneType)
PLAIN = frozenset(PLAIN_CLASSES)  # a set, since most atoms are asked
MAX_ENTRIES = 1000  # of a container that a walk enters; longer ones are data
WITHOUT_PARTS = (*PLAIN_CLASSES, type, types.ModuleType)  # a walk passes these over


def map_atoms(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function(atom)`` in the place of each atom.

    Containers keep their types.
    """
    flat, build = flatten(value)
    # A list first: what the function raises is not raised inside of an iterator.
    return build(iter([function(atom) for atom in flat]))


# Takes atoms in order from an iterator, and puts them together.
Build = Callable[[Iterator[Any]], Any]


def flatten(value: Any) -> tuple[list[Any], Build]:
    """Every atom of ``value``, and a function that puts other atoms in their places.

    >>> atoms, build = flatten({"a": 1, "b": (2, 3)})
    >>> atoms, build(iter([10, 20, 30]))
    ([1, 2, 3], {'a': 10, 'b': (20, 30)})
    """
    children, make = _parts(value, value)
    if make is None:
        return [value], next
    flat: list[Any] = []
    builds: list[Build] = []
    for child in children:
        if isinstance(child, Tensor):  # rows may be many thousands of tensors
            flat.append(child)
            builds.append(next)
        else:
            atoms_of_child, build_child = flatten(child)
            flat += atoms_of_child
            builds.append(build_child)

    def build(remaining: Iterator[Any]) -> Any:
        return make([build_child(remaining) for build_child in builds])

    return flat, build


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function(tensor)`` for each tensor; other atoms stay."""
    return map_atoms(
        lambda atom: function(atom) if isinstance(atom, Tensor) else atom, value
    )


def merge(
    function: Callable[[list[Any]], Any],
    values: Sequence[Any],
    is_atom: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> Any:
    """One value from several of the same structure.

    ``function`` gets the atoms of each position. If ``is_atom(values)``, the values of
    a position count as atoms.

    >>> merge(sum, [{"a": 1, "b": (2, 3)}, {"a": 10, "b": (20, 30)}])
    {'a': 11, 'b': (22, 33)}
    """
    first = values[0]
    _, make = _parts(first, first)
    # By class: a list and a tuple of the same items are joined as two atoms.
    are_alike = {type(first)}.issuperset(map(type, values))
    if make is None or not are_alike or is_atom(values):
        return function(list(values))
    _refuse_other_keys(values)
    # In the order of the first one's keys: mappings may differ in theirs.
    children = [list(_parts(value, first)[0]) for value in values]  # of each value
    if len(set(map(len, children))) > 1:
        return function(list(values))
    merged: list[Any] = []
    for values_of_position in zip(*children, strict=True):
        merged.append(merge(function, values_of_position, is_atom))
    return make(merged)


def atoms(value: Any) -> list[Any]:
    """Every atom of ``value``, in order."""
    flat, _ = flatten(value)
    return flat


def with_contents(value: Any) -> list[Any]:
    """``value`` and every container and atom in it, the outer ones first."""
    values = [value]
    for child in children_of(value):
        if isinstance(child, Tensor):  # rows may be many thousands of tensors
            values.append(child)
        else:
            # A value that contains itself ends in Python's ``RecursionError``.
            values += with_contents(child)
    return values


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of ``value``, in order."""
    return [atom for atom in atoms(value) if isinstance(atom, Tensor)]


Path = tuple[int, ...]  # which child of each container, from the outermost


def paths_of_tensors(value: Any) -> list[Path]:
    """The path of every tensor of ``value``, in the order of ``tensors``.

    >>> paths_of_tensors((1, [torch.ones(2), {"a": torch.ones(2)}]))
    [(1, 0), (1, 1, 0)]
    """
    if isinstance(value, Tensor):
        return [()]
    paths: list[Path] = []
    for number, child in enumerate(children_of(value)):
        paths += [(number, *path) for path in paths_of_tensors(child)]
    return paths


def part_at(value: Any, path: Path) -> Any:
    """What is at a path of ``value``."""
    for number in path:
        value = list(children_of(value))[number]
    return value


def walk(
    roots: Iterable[Any],
    children: Callable[[Any], Iterable[Any]],
    depth: int,
    max_values: int | None = None,
) -> list[Any]:
    """``roots`` and the values that they lead to, nearest first.

    Each once, except plain values. ``children`` gives those of one value. If it raises,
    as a user's object may, the value has none.
    """
    values: list[Any] = []  # keeps all of them alive, so that no id is used again
    seen: set[int] = set()
    level = list(roots)
    for levels_below in range(depth, -1, -1):
        next_level: list[Any] = []
        for value in level:
            # Not of the value itself: a proxy asks an object that may be gone.
            is_plain = issubclass(type(value), WITHOUT_PARTS)
            if not is_plain and id(value) in seen:
                continue
            if len(values) == max_values:
                return values
            values.append(value)
            if is_plain:
                continue
            seen.add(id(value))
            if levels_below:
                try:
                    next_level += children(value)
                except Exception:  # raised by a user's object
                    continue
        level = next_level
    return values


def children_of(value: Any) -> Iterable[Any]:
    """The direct parts of a container; none of an atom."""
    return _parts(value, value)[0]


Make = Callable[[list[Any]], Any]  # makes a container from new children


def _parts(value: Any, like: Any) -> tuple[Iterable[Any], Make | None]:
    """The children of ``value``, and how to make such a container from others.

    Children are in the order of ``like``'s keys. An atom has no children, and ``None``.
    """
    # First: nearly all containers are of these classes, which are their own
    # constructors.
    if type(value) in (tuple, list):
        return value, type(value)
    # A size is an atom, because it would be made again as a plain tuple.
    if type(value) in PLAIN or isinstance(value, (Tensor, torch.Size)):
        return (), None
    if isinstance(value, (tuple, list)):
        return value, functools.partial(sequence_like, value)
    if isinstance(value, Mapping):
        if type(value) is not dict:
            _refuse_iteration_over_rows(value)
        keys = list(like)
        children = [value[key] for key in keys]
        return children, functools.partial(_mapping_like, value, keys)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        # A field without a default may not have been set.
        names = [field.name for field in fields if hasattr(value, field.name)]
    elif is_cache(value):
        names = [name for name, item in vars(like).items() if _is_of_cache(item)]
    else:
        return (), None
    children = [getattr(value, name) for name in names]
    return children, functools.partial(_object_like, value, names)


def _mapping_like(original: Any, keys: list[Any], children: Iterable[Any]) -> Any:
    """A mapping of the original's class and attributes, with other values.

    The original is never written: a copy of it may share what holds its values.
    """
    values = dict(zip(keys, children, strict=True))
    if type(original) in (dict, types.MappingProxyType):
        return values
    mapping = copy.copy(original)
    if mapping is original:  # it cannot be changed
        return values
    forget_computed(mapping)
    if isinstance(original, dict) or hasattr(type(original), "__copy__"):
        # Such a copy has values of its own, a default factory, and attributes.
        for key, child in values.items():
            mapping[key] = child
        if getattr(original, "__dict__", None) is original:  # attributes are items
            mapping.__dict__ = mapping
        return mapping
    for name, attribute in [*getattr(mapping, "__dict__", {}).items()]:
        if isinstance(attribute, dict):
            entries = copy.copy(attribute)
            entries.update((key, values[key]) for key in entries.keys() & values)
            vars(mapping)[name] = entries
    is_made = all(mapping[key] is child for key, child in values.items())
    return mapping if is_made else values


def _object_like(original: Any, names: list[str], children: Iterable[Any]) -> Any:
    """An object of the original's class, with other values of these attributes."""
    result = copy.copy(original)
    forget_computed(result)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(result, name, child)  # of frozen dataclasses, too
    return result


def sequence_like(original: Any, children: Iterable[Any]) -> Any:
    """A tuple or list of the original's class and attributes, with other items."""
    kind: Any = type(original)
    if hasattr(kind, "n_sequence_fields"):  # such as ``torch.return_types.max``
        return kind(children)
    # Not the methods of a subclass, which may do something else.
    if isinstance(original, tuple):
        sequence: Any = tuple.__new__(kind, children)
    else:
        sequence = list.__new__(kind)
        list.extend(sequence, children)
    if hasattr(original, "__dict__"):
        vars(sequence).update(vars(original))
        forget_computed(sequence)
    return sequence


def forget_computed(value: Any) -> None:
    """Drop the values of cached properties: they were computed from other contents."""
    attributes = getattr(value, "__dict__", {})
    for name in [*attributes]:
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del attributes[name]


def _refuse_iteration_over_rows(value: Mapping[Any, Any]) -> None:
    """Refuse a mapping that iterates over something other than its keys."""
    keys = [*value.keys()]
    # One more than there are keys tells enough, and its rows may be many.
    items = [*islice(value, len(keys) + 1)]
    # By class first: ``==`` of rows that are tensors is no answer.
    if [*map(type, items)] != [*map(type, keys)] or items != keys:
        remedy = "{key: batch[key] for key in batch.keys()}"
        if hasattr(value, "to_dict"):
            remedy = "batch.to_dict()"
        raise TypeError(
            f"a {type(value).__name__} iterates over its rows, not over its keys, so "
            f"the engine does not find its tensors; pass a dict in its place: {remedy}"
        )


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of ``transformers``, or a layer of one."""
    # By name: nothing is imported of a library that the user may not have.
    modules = [base.__module__ for base in type(value).__mro__]
    return "transformers.cache_utils" in modules


def _is_of_cache(item: Any) -> bool:
    """Whether an attribute of a cache has tensors."""
    return isinstance(item, (Tensor, list)) or is_cache(item)


def _refuse_other_keys(values: Sequence[Any]) -> None:
    """Raise ``ValueError`` for mappings with different keys."""
    if not isinstance(values[0], Mapping):
        return
    if any(value.keys() != values[0].keys() for value in values):
        keys = [str(sorted(map(str, value))) for value in values]
        raise ValueError(
            f"mappings with different keys cannot be joined: {' and '.join(keys)}; "
            f"return mappings with the same keys for all rows"
        )
