"""The values that values lead to: one function per question, with its depth.

::

    question                         function                    deep    many
    what does a function use?        ``reachable``               4
    what may a criterion train?      ``values_to_search``        4       10,000 values
    which program is it?             ``distinguishing_values``   64      64 values
    is it of a replica?              ``leads_to``                64
    what do functions close over?    ``closed_over``             64
    what may a call write?           ``Walk``                    16
    what does a replica copy?        ``ModuleContents``
    what does no split divide?       ``batch/objects.py``        3 or 5
    what has a call moved?           ``moved_state.py``          3       32 entries

A container of more than 1000 entries is data, or a log, to all of them; for the program
one of more than 32. The first three follow what a value binds, closures, globals,
attributes and entries; not keys, slots and classes, nor weak references, which lead to
trainers and loops. The next two follow what a copy would be made of: what a value
binds, weak references, closures, entries and keys, but no globals, which a copy cannot
exchange. Decorators are a function each, so these two go far. ``Walk`` follows keys,
slots and classes, too, since a call may write them. ``ModuleContents`` follows
attributes of modules, entries and keys, and functions only if they lead to a module:
replicas share them. Rows of a batch are split by ``batch/nested.py``, so what no split
divides is in attributes and slots. ``moved_state.py`` walks by itself, since it tells
contents by their keys.
``tests/objects/test_reach.py`` has a row for each way to refer to a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch.nested import MAX_ENTRIES, PLAIN, WITHOUT_PARTS, walk
from scatterpar.libraries import package_of
from scatterpar.objects.references import (
    CONTAINERS,
    MUTABLE_CONTAINERS,
    named_values,
    parts_of,
)

SEARCH_DEPTH = (
    4  # a function, another one in its file, an object there, a list in the object
)
_MAX_SEARCHED = 10_000  # values; they take 10 ms in each step
_MIN_LOG = 64  # longer containers are logs, unless a tensor or module is in them
_LOG_ENTRIES = 8  # of a log that are searched, at either end
_REFERENTS = Tensor, nn.Module, torch.Generator
# A function in each other, such as decorators, and containers in these. A longer chain
# is data, such as a linked list.
_CHAIN = 64
_MAX_TOLD_APART = 64  # values: a key of them is made in each step
_MAX_ENTRIES_TOLD_APART = 32  # of a container; longer ones are data, such as a log


def reachable(root: Any, depth: int = SEARCH_DEPTH) -> list[Any]:
    """``root`` and what it uses, nearest first, up to modules and tensors."""
    return walk([root], _used_by, depth)


def _used_by(value: Any) -> Collection[Any]:
    """The values that a function, an object or a container leads to.

    Nothing inside of modules, tensors, objects of torch and long containers.
    """
    if isinstance(value, (Tensor, nn.Module)):
        return ()
    # Without ``parts_of``: each step passes hundreds of lists and dicts of a log.
    if isinstance(value, CONTAINERS):
        if len(value) > MAX_ENTRIES:
            return ()
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return value.__self__, value.__func__
    if package_of(value) == "torch":
        return ()
    return named_values(value).values()


def values_to_search(function: Any) -> list[Any]:
    """A criterion, and the values among which a step looks for what it trains.

    Each step searches, so numbers and words are passed over, and logs for the most
    part.
    """
    return walk([function], _to_search_in, SEARCH_DEPTH, _MAX_SEARCHED)


def _to_search_in(value: Any) -> Collection[Any]:
    """The values that ``value`` uses, without those that lead to no tensor.

    Of a log, the first and the last values are searched. A network that only a value
    between them has gets no gradient all the same: the graph of the loss shows it.
    """
    children = _used_by(value)
    kinds = set(map(type, children))
    if kinds <= PLAIN:
        return ()
    is_long = len(children) > _MIN_LOG and isinstance(value, CONTAINERS)
    if is_long and not any(issubclass(kind, _REFERENTS) for kind in kinds):
        entries = list(children)
        return entries[:_LOG_ENTRIES] + entries[-_LOG_ENTRIES:]
    return children


def distinguishing_values(functions: Sequence[Any]) -> list[Any]:
    """The values by which the programs that functions run are told apart.

    Of modules, plain attributes, buffers and children are among them.
    """
    return walk(functions, _telling_apart, _MAX_TOLD_APART, _MAX_TOLD_APART)


def _telling_apart(value: Any) -> Collection[Any]:
    if isinstance(value, nn.Module):
        if package_of(value) == "scatterpar":  # it counts its steps
            return ()
        attributes = vars(value)
        plain = [
            item for item in attributes.values() if isinstance(item, WITHOUT_PARTS)
        ]
        return [*plain, *value._buffers.values(), *value._modules.values()]
    is_container = isinstance(value, (dict, list, tuple))
    if is_container and len(value) > _MAX_ENTRIES_TOLD_APART:
        return ()
    return _used_by(value)


def leads_to(value: Any, is_target: Callable[[Any], bool]) -> bool:
    """Whether ``value`` is a target, or a copy of it would be made of one.

    A value leads to what it is made of, a function to what it closes over, a container
    to its entries and keys.
    """

    def made_of(value: Any) -> Collection[Any]:
        # Not further than a target, which may be long.
        return () if is_target(value) else _parts_or_entries(value)

    return any(map(is_target, walk([value], made_of, _CHAIN)))


def closed_over(functions: Iterable[Any]) -> list[Any]:
    """``functions`` and what they close over, nearest first, up to containers."""
    return walk(functions, _parts_unless_container, _CHAIN)


def _parts_or_entries(value: Any) -> Collection[Any]:
    if type(value) not in MUTABLE_CONTAINERS:
        return _parts_unless_container(value)
    if len(value) > MAX_ENTRIES:
        return ()
    return [*value, *value.values()] if isinstance(value, dict) else value


def _parts_unless_container(value: Any) -> Collection[Any]:
    if type(value) in MUTABLE_CONTAINERS:
        return ()
    parts = parts_of(value)
    return [*parts.made_of(), *parts.closure.values()]
