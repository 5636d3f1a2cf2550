"""Objects in a batch that hold rows which nothing splits.

Tensors, lists, tuples, mappings and dataclasses are split into rows. Any other object,
and what a container has in attributes beside its items, goes whole to every
micro-batch. That is right for a configuration, and wrong for an object that is itself a
batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Container, Mapping, Sequence, Set, ValuesView
from typing import Any

from torch import Tensor, nn

from scatterpar.batch import nested

_OBJECT_DEPTH = 3  # an object, an object or list in it, and what that holds
_WITHOUT_ROWS = (*nested.PLAIN_CLASSES, type, nn.Module)


def unsplit_rows(value: Any, dim: int, sizes: Container[int]) -> str | None:
    """The name of an attribute of ``value`` with tensors that seem to hold rows.

    ``sizes`` are the numbers of rows in the rest of the batch. ``None`` if no tensor in
    an attribute has one of them, or if tensors of other sizes are beside it, as the
    edges of a graph are: one size may then be that of the rows by chance.
    """
    names: dict[int, str] = {}  # by size, the first attribute that has it
    for name, attribute in _attributes(value).items():
        for tensor in tensors_within(attribute, _OBJECT_DEPTH):
            if -tensor.ndim <= dim < tensor.ndim:
                names.setdefault(tensor.size(dim), name)
    # As of the nodes and edges of a graph: one may be the number of rows by chance.
    if len(names) != 1:
        return None
    ((size, name),) = names.items()
    return name if size > 1 and size in sizes else None


def remedy_for(value: Any) -> str:
    """The remedy for an object with rows that nothing splits."""
    kind = type(value).__name__
    if isinstance(value, (Sequence, deque, Set, ValuesView)):
        return "a list of its items, list(value)"
    if hasattr(value, "__dict__"):
        return f"a dict of them, such as vars(value), and build the {kind} in forward"
    return f"a dict of them, by name, and build the {kind} in forward"


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of ``value`` that nothing splits, by name."""
    if isinstance(value, (Tensor, Mapping, *_WITHOUT_ROWS)):
        return {}
    # Its ``__dict__``, or a tuple of that and the values of its slots.
    state = object.__getstate__(value)
    attributes: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        attributes |= part or {}
    for name in [*attributes]:
        # A cached property is computed again from the rows of a micro-batch.
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del attributes[name]
    if dataclasses.is_dataclass(value):  # its fields are split
        for field in dataclasses.fields(value):
            attributes.pop(field.name, None)
    if isinstance(value, (deque, Set, ValuesView)):
        attributes[type(value).__name__] = list(value)
    return attributes


def tensors_within(value: Any, depth: int) -> list[Tensor]:
    """The tensors in ``value``, at most ``depth`` objects or containers deep."""
    values = nested.walk([value], _children, depth)
    return [inner for inner in values if isinstance(inner, Tensor)]


def _children(value: Any) -> Sequence[Any]:
    children = [*_attributes(value).values()]
    if isinstance(value, Mapping):
        children += value.values()
    elif isinstance(value, (list, tuple)):
        children += value
    # A batch is asked in each step.
    return children if len(children) <= nested.MAX_ENTRIES else ()
