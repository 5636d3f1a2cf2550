"""What a loop's owner keeps, such as containers and tensors, and copies for a call.

A step function writes into objects that its owner, such as a Trainer, keeps. Replicas
call the step function at the same time, and looks call it for some rows. So a call gets
copies (``CallCopies``), and its changes are added to the originals (``changes.py``).
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.replicas import references
from scatterpar.replicas.references import parts_of, walk

# longer containers are copied and appended to, but their entries are not searched
MAX_ENTRIES = 1000
MAX_DEPTH = 8
MAX_OBJECTS = 2000  # of one owner; what goes beyond is shared by all calls
MAX_ELEMENTS = 2**16  # of an array; larger ones are data, and shared
_CONTAINERS = (dict, list, deque, set)
_LOCKS = {"_thread", "threading", "queue"}
# Classes of libraries, and of Python, whose objects step functions write, too.
_WRITTEN = {"Namespace", "SimpleNamespace", "SimpleProfiler"}
_WRITTEN |= {"ChainMap", "TrainerControl", "TrainerState", "UserDict", "UserList"}
# Classes of the user's, by the end of a base's name, that lead to data or to the loop.
_NOT_COPIED = ("Dataset", "DataLoader", "DataModule", "Sampler", "Trainer", "Callback")

# Of a class's flags: it is defined in Python, and object.__new__ can make objects.
_IS_HEAP_TYPE = 1 << 9

# Names on the way to a value: an attribute's, or the key of an entry in brackets.
Path = tuple["Attribute | Entry", ...]


@dataclass(frozen=True)
class Attribute:
    """A part of a path: an attribute of an object."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"

    def read(self, holder: Any) -> Any:
        """The attribute's value, or its class's. Raises ``AttributeError``."""
        return getattr(holder, self.name)

    def write(self, holder: Any, value: Any) -> None:
        """Set the attribute."""
        vars(holder)[self.name] = value


@dataclass(frozen=True)
class Entry:
    """A part of a path: an entry of a list or mapping."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"

    def read(self, holder: Any) -> Any:
        """The entry. Raises ``LookupError`` if there is none."""
        return holder[self.key]

    def write(self, holder: Any, value: Any) -> None:
        """Set the entry."""
        holder[self.key] = value


def is_container(value: Any) -> bool:
    """Whether ``value`` is a container whose entries calls may add to."""
    return isinstance(value, _CONTAINERS)


def is_object(value: Any) -> bool:
    """Whether ``value`` is a plain object of a class of the user's, with attributes."""
    if isinstance(value, (type, enum.Enum, Tensor, nn.Module, BaseException)):
        return False
    if not hasattr(value, "__dict__") or not _is_copied(type(value)):
        return False
    attributes = vars(value).values()
    return _LOCKS.isdisjoint(type(attribute).__module__ for attribute in attributes)


def _is_copied(kind: type) -> bool:
    """Whether calls get copies of objects of this class."""
    if kind.__name__ in _WRITTEN:
        return True
    if is_of_a_library(kind.__module__):
        return False
    if any(hasattr(kind, name) for name in ("__next__", "__del__", "__len__")):
        return False  # iterators, owners of resources, data sets
    return not any(base.__name__.endswith(_NOT_COPIED) for base in kind.__mro__)


@functools.lru_cache(maxsize=4096)
def is_of_a_library(module: str | None) -> bool:
    """Whether a module, given by its name, is torch's, Python's, or in a package."""
    root = str(module).partition(".")[0]
    if root == "__main__":
        return False
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    known = root in sys.stdlib_module_names or root in ("torch", "scatterpar")
    return known or "-packages" in str(file)


def kept_attributes(owner: Any, excluded: Container[str]) -> dict[str, Any]:
    """The attributes of ``owner`` by name, without those ``excluded``."""
    attributes = vars(owner).items()
    return {name: value for name, value in attributes if name not in excluded}


def modules_kept(values: Iterable[Any]) -> list[nn.Module]:
    """The modules in ``values``, also in containers and objects, each once."""
    return [value for value in values_kept(values) if isinstance(value, nn.Module)]


def values_kept(values: Iterable[Any]) -> list[Any]:
    """The values in ``values``, also in containers and objects, each once."""
    return list(walk(values, _entries_to_search, MAX_DEPTH - 1))


def _entries_to_search(value: Any) -> Collection[Any]:
    """The entries of a container or tuple, and the attributes of a user's object."""
    parts = parts_of(value)
    entries: Collection[Any] = ()
    if is_container(value) or type(value) is tuple:
        entries = parts.entries
    elif is_object(value):
        entries = parts.attributes.values()
    return entries if len(entries) <= MAX_ENTRIES else ()


class CallCopies:
    """Copies of values for one call: of their containers, objects and small tensors.

    Copies refer to each other as the originals do. Everything else is shared.

    Args:
        device: where the call computes; tensors are copied there.
        replicas: what stands for an original, by its ``id``.
        pinned: the ``id`` of each object that is not copied, because functions that the
            call does not copy refer to it. Modules and tensors in it are exchanged.
    """

    def __init__(
        self,
        device: torch.device,
        replicas: Mapping[int, Any] = types.MappingProxyType({}),
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        self._device = device
        self.pinned = pinned
        self._copies: dict[int, Any] = dict(replicas)
        self._originals: list[Any] = []  # keeps their ids in use

    @classmethod
    def ids_in(cls, values: Iterable[Any]) -> set[int]:
        """The ``id`` of each object in ``values`` that a call gets a copy of."""
        copies = cls(torch.device("cpu"))
        for value in values:
            copies.of(value)
        return {*copies._copies}

    def of(self, value: Any, depth: int = 0) -> Any:
        """The copy of ``value``, or ``value`` itself if it is shared."""
        if isinstance(value, PLAIN_CLASSES):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if depth > MAX_DEPTH or len(self._originals) > MAX_OBJECTS:
            return value
        if id(value) in self.pinned:
            return self._exchange(value, depth)
        if isinstance(value, Tensor):
            return self._remember(value, self._tensor(value))
        if type(value) is numpy.ndarray:
            is_small = value.size <= MAX_ELEMENTS
            return self._remember(value, value.copy() if is_small else value)
        if type(value) in (tuple, functools.partial):
            return self._remade(value, depth)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if is_container(value):
            return self._container(value, depth)
        if is_object(value):
            return self._object(value, depth)
        return value

    def _remember(self, value: Any, copied: Any) -> Any:
        self._copies[id(value)] = copied
        self._originals.append(value)
        return copied

    def _exchange(self, value: Any, depth: int) -> Any:
        """Exchange the entries of a pinned object for their copies. Returns it."""
        self._remember(value, value)
        live: Any = value if is_container(value) else getattr(value, "__dict__", ())
        is_searched = isinstance(live, (dict, list)) and len(live) <= MAX_ENTRIES
        for key, entry in entries_of(live) if is_searched else ():
            entry_copy = self.of(entry, depth + 1)
            if entry_copy is not entry:
                live[key] = entry_copy
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.requires_grad:
            return tensor
        if self._is_elsewhere(tensor):
            return tensor.to(self._device)
        return tensor.clone() if tensor.numel() <= MAX_ELEMENTS else tensor

    def _remade(self, value: Any, depth: int) -> Any:
        """A tuple or partial of copies, if any of its parts has a copy."""
        parts = parts_of(value)
        originals = parts.made_of()
        copies = [self.of(original, depth + 1) for original in originals]
        if parts.make is None or all(map(is_, copies, originals)):
            return value
        return self._remember(value, parts.make(*copies))

    def _function(self, value: types.FunctionType, depth: int) -> Any:
        """A function that closes over tensors of the call's device, if they differ."""
        cells = value.__closure__ or ()
        new_cells = []
        for cell in cells:
            content = references.contents(cell)
            copied = content
            is_elsewhere = isinstance(content, Tensor) and self._is_elsewhere(content)
            if is_elsewhere or id(content) in self._copies:
                copied = self.of(content, depth + 1)
            new_cells.append(cell if copied is content else types.CellType(copied))
        if all(map(is_, cells, new_cells)):
            return value
        closure = tuple(new_cells)
        function = types.FunctionType(
            value.__code__, value.__globals__, closure=closure
        )
        function.__defaults__ = value.__defaults__
        function.__kwdefaults__ = value.__kwdefaults__
        return self._remember(value, functools.update_wrapper(function, value))

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu" and tensor.device != self._device

    def _container(self, value: Any, depth: int) -> Any:
        try:
            copied = value.copy()
            if type(copied) is not type(value):  # as of subclasses of list
                copied = copy.copy(value)
        except Exception:  # a class of the user's may refuse it
            return value
        if type(copied) is not type(value) or copied is value:
            return value
        self._remember(value, copied)
        if isinstance(value, set) or len(value) > MAX_ENTRIES:
            return copied
        for key, entry in entries_of(value):
            entry_copy = self.of(entry, depth + 1)
            if entry_copy is not entry:
                copied[key] = entry_copy
        return copied

    def _object(self, value: Any, depth: int) -> Any:
        kind: Any = type(value)
        create = object.__new__ if kind.__flags__ & _IS_HEAP_TYPE else kind.__new__
        try:
            copied = create(kind)
            attributes = vars(copied)
        except Exception:  # a class with a layout of its own
            return value
        self._remember(value, copied)
        for name, attribute in vars(value).items():
            attributes[name] = self.of(attribute, depth + 1)
        return copied


def with_shared(attributes: Mapping[str, Any], names: set[str]) -> set[str]:
    """These ``names``, and those of attributes that share objects with theirs.

    Without those that lead to modules, of which replicas have copies.
    """
    chosen: set[str] = set()
    for group in _sharing_objects(attributes):
        values = [attributes[name] for name in group]
        if not group.isdisjoint(names) and not modules_kept(values):
            chosen |= group
    return chosen


def _sharing_objects(attributes: Mapping[str, Any]) -> list[set[str]]:
    """The names of attributes, in groups that have no object in common."""
    groups: list[tuple[set[str], set[int]]] = []
    for name, value in attributes.items():
        names = {name}
        ids = CallCopies.ids_in([value])
        apart: list[tuple[set[str], set[int]]] = []
        for group_names, group_ids in groups:
            if ids.isdisjoint(group_ids):
                apart.append((group_names, group_ids))
            else:
                names |= group_names
                ids |= group_ids
        groups = [*apart, (names, ids)]
    return [names for names, _ in groups]


def find(values: Mapping[str, Any], kind: type | tuple[type, ...]) -> dict[Path, Any]:
    """The values of these classes in ``values``, also in containers, by their paths."""
    of_kind: dict[Path, Any] = {}
    level: dict[Path, Any] = {}
    for name, value in values.items():
        level[Attribute(name),] = value
    for _ in range(MAX_DEPTH):
        inner: dict[Path, Any] = {}
        for path, value in level.items():
            if isinstance(value, kind):
                of_kind[path] = value
            elif isinstance(value, (dict, list)) and len(value) <= MAX_ENTRIES:
                for key, entry in entries_of(value):
                    inner[*path, Entry(key)] = entry
        level = inner
    return of_kind


def holder_of(owner: Any, path: Path) -> Any:
    """The object of the owner's that has the last part of ``path``."""
    holder = owner
    for part in path[:-1]:
        holder = part.read(holder)
    return holder


def entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and entries of a list, deque or mapping."""
    if isinstance(container, dict):
        return iter(list(container.items()))
    return iter(list(enumerate(container)))
