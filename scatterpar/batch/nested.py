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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

# Classes of values that are told apart by ``==``, and refer to nothing.
PLAIN_CLASSES = (bool, int, float, complex, str, bytes, types.NoneType)
_PLAIN = frozenset(PLAIN_CLASSES)  # a set, since most atoms are asked


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
        if isinstance(child, Tensor):  # most children are tensors
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
    if is_atom(values) or not _are_alike(values):
        return function(list(values))
    first = values[0]
    _, make = _parts(first, first)
    if make is None:
        return function(list(values))
    # In the order of the first one's keys: mappings may differ in theirs.
    children = [_parts(value, first)[0] for value in values]  # of each value
    merged: list[Any] = []
    for values_of_position in zip(*children, strict=True):
        merged.append(merge(function, values_of_position, is_atom))
    return make(merged)


def atoms(value: Any, *, containers: bool = False) -> list[Any]:
    """Every atom of ``value``, in order.

    With ``containers`` each container is there, too, before its atoms.
    """
    children, make = _parts(value, value)
    if make is None:
        return [value]
    flat = [value] if containers else []
    for child in children:
        if isinstance(child, Tensor):  # rows may be many thousands of tensors
            flat.append(child)
        else:
            flat += atoms(child, containers=containers)
    return flat


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of ``value``, in order."""
    return [atom for atom in atoms(value) if isinstance(atom, Tensor)]


def children_of(value: Any) -> Iterable[Any]:
    """What a container consists of directly; nothing for an atom."""
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
    if type(value) in _PLAIN or isinstance(value, (Tensor, torch.Size)):
        return (), None
    if isinstance(value, tuple):
        return value, functools.partial(tuple_like, value)
    if isinstance(value, list):
        return value, functools.partial(_list_like, value)
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
    if isinstance(original, dict) or hasattr(type(original), "__copy__"):
        # Such a copy has values of its own, a default factory, and attributes.
        for key, child in values.items():
            mapping[key] = child
        if getattr(original, "__dict__", None) is original:  # attributes are items
            mapping.__dict__ = mapping
    else:
        for name, attribute in [*getattr(mapping, "__dict__", {}).items()]:
            if type(attribute) in (dict, OrderedDict):
                entries = type(attribute)(attribute)
                entries.update((k, v) for k, v in values.items() if k in entries)
                vars(mapping)[name] = entries
        if not all(mapping[key] is child for key, child in values.items()):
            return values
    _forget_computed(mapping)
    return mapping


def _object_like(original: Any, names: list[str], children: Iterable[Any]) -> Any:
    """An object of the original's class, with other values of these attributes."""
    result = copy.copy(original)
    _forget_computed(result)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(result, name, child)  # of frozen dataclasses, too
    return result


def tuple_like(original: tuple[Any, ...], children: Iterable[Any]) -> Any:
    """A tuple of the original's class and attributes, with other items."""
    kind: Any = type(original)
    if hasattr(kind, "n_sequence_fields"):  # such as ``torch.return_types.max``
        return kind(children)
    # Not the constructor, which may take other arguments than the items.
    make = getattr(kind, "_make", functools.partial(tuple.__new__, kind))
    return _with_attributes(make(children), original)


def _list_like(original: list[Any], children: Iterable[Any]) -> Any:
    """A list of the original's class and attributes, with other items."""
    # The constructor and ``extend`` of a subclass may do something else.
    copy_of_list = list.__new__(type(original))
    list.extend(copy_of_list, children)
    return _with_attributes(copy_of_list, original)


def _with_attributes(container: Any, original: Any) -> Any:
    """``container`` with the attributes of ``original``, of the same class."""
    if hasattr(original, "__dict__"):
        vars(container).update(vars(original))
        _forget_computed(container)
    return container


def _forget_computed(value: Any) -> None:
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
    pairs = zip(items, keys, strict=False)
    are_keys = all(type(item) is type(key) and item == key for item, key in pairs)
    if len(items) != len(keys) or not are_keys:
        remedy = "its .to_dict()" if hasattr(value, "to_dict") else "{key: value[key]}"
        raise TypeError(
            f"a {type(value).__name__} iterates over its rows, not over its keys, so "
            "its parts cannot be told from its rows; use a dict in its place, such as "
            f"{remedy}"
        )


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of ``transformers``, or a layer of one."""
    # By name: nothing is imported of a library that the user may not have.
    modules = [base.__module__ for base in type(value).__mro__]
    return "transformers.cache_utils" in modules


def _is_of_cache(item: Any) -> bool:
    """Whether an attribute of a cache has tensors."""
    return isinstance(item, (Tensor, list)) or is_cache(item)


def refuse_distributions(output: Any) -> None:
    """Refuse distributions in an output: nobody can detach or join their tensors."""
    for atom in atoms(output):
        if isinstance(atom, torch.distributions.Distribution):
            raise TypeError(
                f"the module's output contains a {type(atom).__name__}, a "
                "distribution, whose tensors can be neither detached nor joined; "
                "return the tensors that it is made of, and make it in the criterion"
            )


def refuse_sparse_outputs(output: Any) -> None:
    """Refuse sparse tensors in an output: the gradients of joined rows are dense."""
    for tensor in tensors(output):
        if tensor.layout != torch.strided and not tensor.is_nested:
            raise TypeError(
                f"the module's output contains a tensor of layout {tensor.layout}, "
                "which whole_batch=True cannot join; return it dense, by .to_dense()"
            )


def refuse_generators(output: Any) -> None:
    """Refuse generators in an output.

    They would run later, outside of any replica's context.
    """
    for atom in atoms(output):
        if isinstance(atom, Iterator):
            raise TypeError(
                f"the module's output contains a {type(atom).__name__} that has not "
                f"been consumed; return a list or tuple of its items"
            )


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether the outermost containers have the same structure.

    Raises ``ValueError`` for mappings with different keys.
    """
    first = values[0]
    # By class: a list and a tuple of the same items are joined as two atoms.
    if any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, (tuple, list)):
        return all(len(value) == len(first) for value in values)
    if not isinstance(first, Mapping):
        return True
    if any(value.keys() != first.keys() for value in values):
        keys = [str(sorted(map(str, value))) for value in values]
        raise ValueError(
            f"mappings with different keys cannot be joined: {' and '.join(keys)}; "
            f"return the same keys for all rows"
        )
    return True
