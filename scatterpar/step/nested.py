"""Nested values: tensors inside tuples, lists, mappings and dataclasses, at any depth.

What a tensor of the user's own class does is never called inside a generator: its
``StopIteration`` would come out as another error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["leaves", "merge", "refuse_generators", "tensors", "transform"]


def transform(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf replaced by ``function(leaf)``; containers keep their types."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([transform(function, item) for item in value])
    if type(value) is dict:
        return {key: transform(function, item) for key, item in value.items()}
    return merge(lambda pieces: function(pieces[0]), [value])


def merge(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """One value out of several of the same structure: ``function`` gets the leaves of a place.

    >>> merge(sum, [{"a": 1, "b": (2, 3)}, {"a": 10, "b": (20, 30)}])
    {'a': 11, 'b': (22, 33)}
    """
    first = values[0]
    if not _alike(values):
        return function(list(values))
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*[merge(function, items) for items in zip(*values, strict=True)])
    if isinstance(first, (tuple, list)):
        return type(first)([merge(function, items) for items in zip(*values, strict=True)])
    if isinstance(first, Mapping):
        merged = {key: merge(function, [value[key] for value in values]) for key in first}
        return _same_mapping(first, merged)
    if _is_dataclass(first):
        fields = [field.name for field in dataclasses.fields(first)]
        result = copy.copy(first)
        for name in fields:
            pieces = [getattr(value, name) for value in values]
            object.__setattr__(result, name, merge(function, pieces))
        return result
    return function(list(values))


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf of ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (tuple, list)):
        children: Any = value
    elif isinstance(value, Mapping):
        children = value.values()
    elif _is_dataclass(value):
        children = (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        yield value
        return
    for child in children:
        yield from leaves(child)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of ``value``, in order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def refuse_generators(output: Any) -> None:
    """Refuse what has not been computed yet: it would run later, in no replica's context.

    Raises:
        TypeError: a module's output is a generator, a ``map`` or another iterator, or holds one.
    """
    for leaf in leaves(output):
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"the module's output holds a {type(leaf).__name__}, which nobody has run yet; "
                f"return a list or tuple of what it yields"
            )


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _alike(values: Sequence[Any]) -> bool:
    """Whether the outermost containers have the same shape, so that they can be walked together."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, (tuple, list)):
        return all(len(value) == len(first) for value in values)
    if isinstance(first, Mapping):
        _require_same_keys(values)
    return True


def _require_same_keys(values: Sequence[Mapping[Any, Any]]) -> None:
    keys = values[0].keys()
    for number, value in enumerate(values):
        if value.keys() != keys:
            raise ValueError(
                f"mappings with different keys cannot be joined: {sorted(map(str, keys))} in the "
                f"first, {sorted(map(str, value))} in number {number}, counted from 0; return "
                f"the same keys for all rows"
            )


def _same_mapping(like: Mapping[Any, Any], merged: dict[Any, Any]) -> Mapping[Any, Any]:
    """``merged`` in the type of ``like``, with whatever else that type carries."""
    if not hasattr(like, "__setitem__"):
        return merged
    result = copy.copy(like)
    for key, value in merged.items():
        result[key] = value
    return result
