"""The values that roots lead to, and the places that refer to them.

::

    value                       leads by these places to others
    the user's object, module   ATTRIBUTE, SLOT; and CLASS, of its class
    list, dict, deque, set      ENTRY, KEY
    the user's function         CELL, GLOBAL; PART: its defaults
    tuple, partial, method      PART: cannot be written, but be made again
    array of objects, view      PART: its entries; the dictionary of a view
    tensor                      ATTRIBUTE; PART, of a quantised one
    a library's function        CELL: functions and modules that it closes over
    a library's object          ATTRIBUTE: files; all, if it is a root
    data                        nothing, unless it is a root

``parts_of`` says what values are made of, ``whose`` which objects are the user's.
"""

from __future__ import annotations

import builtins
import enum
import functools
import gc
import io
import logging
import queue
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from scatterpar.batch.nested import MAX_ENTRIES, PLAIN
from scatterpar.libraries import is_library
from scatterpar.objects.quantised import is_composite, is_state, tensors_in
from scatterpar.objects.references import (
    globals_named_in,
    is_array,
    names_in,
    parts_of,
    read_attribute,
)
from scatterpar.objects.snapshot import entries_of
from scatterpar.objects.whose import (
    Whose,
    attributes_of,
    is_user_class,
    whose,
)
from scatterpar.torch_private.compiler import unwrapped

# A chain of objects is as long as this at most: a longer one is data, such as a linked
# list. Modules begin a new chain, because networks may be deep.
LONGEST_CHAIN = 16
# The saved references of such a list take 8 MB.
_MAX_SAVED_ENTRIES = 2**20  # of a container: a longer one is data
UNSET = object()  # the value of a place that has none
# Classes that override this compute their items, such as a library's table of classes.
_GETTERS = dict.__getitem__, list.__getitem__, deque.__getitem__, None
# What a library's decorator may call of the user's.
_FUNCTIONS = types.FunctionType, types.MethodType, nn.Module
_BUILTIN_METHODS = types.BuiltinMethodType, types.MethodWrapperType
_CONTENTS_OF_CELL: Any = vars(types.CellType)["cell_contents"]
_NAMELESS = {"_modules", "_parameters", "_buffers"}  # containers inside of modules


class PlaceKind(enum.Enum):
    """How a holder refers to a value."""

    ATTRIBUTE = "an entry of a __dict__"
    ENTRY = "an entry of a list, deque or dictionary"
    KEY = "a key of a dictionary, or an element of a set"
    SLOT = "a slot of an object"
    CELL = "a variable that a function closes over"
    GLOBAL = "a global variable that a function names"
    CLASS = "an attribute of a class"
    PART = "a part of a value that cannot be changed"


# Places that no container saves.
# A tuple: the hash of a member of an enumeration takes a call of Python.
VARIABLES = PlaceKind.SLOT, PlaceKind.CELL, PlaceKind.GLOBAL, PlaceKind.CLASS

# A place of which the walk knows the parent: kind, holder, key and value.
Entry = tuple[PlaceKind, Any, Any, Any]


class Place(NamedTuple):
    """Where a value is referred to.

    Attributes:
        kind: how the holder refers to the value.
        holder: a container, the ``__dict__`` of an object, the object with a slot, a
            cell, a class, or the dictionary of globals.
        key: a key, an index, a descriptor of a slot, or a name.
        value: the value when the walk was made.
        parent: the number of the walk's value to which this place belongs.
    """

    kind: PlaceKind
    holder: Any
    key: Any
    value: Any
    parent: int

    @property
    def _descriptor(self) -> Any:
        """The descriptor by which a slot or a cell is read and written."""
        # Not by name: a subclass may have an attribute of the slot's name.
        return self.key if self.kind is PlaceKind.SLOT else _CONTENTS_OF_CELL

    def read(self) -> Any:
        """The present value; ``UNSET`` if there is none."""
        try:
            if self.kind in (PlaceKind.SLOT, PlaceKind.CELL):
                return self._descriptor.__get__(self.holder)
            if self.kind is PlaceKind.CLASS:
                return vars(self.holder)[self.key]
            return self.holder[self.key]
        except (AttributeError, LookupError, ValueError):
            # Attributes and entries may be gone, and a cell may be empty.
            return UNSET

    def write(self, value: Any) -> None:
        """Write a value. ``UNSET`` removes that of a slot, a cell or a global."""
        if self.kind in (PlaceKind.SLOT, PlaceKind.CELL):
            if value is UNSET:
                self._descriptor.__delete__(self.holder)
            else:
                self._descriptor.__set__(self.holder, value)
        elif self.kind is PlaceKind.CLASS:
            setattr(self.holder, self.key, value)
        elif value is UNSET:
            del self.holder[self.key]
        else:
            self.holder[self.key] = value


_wrappers: list[type[nn.Module]] = []


def register_wrapper(kind: type[nn.Module]) -> None:
    """Walk ``wrapper.module`` in the place of wrappers of this class.

    An engine registers itself, because it restores its own state.
    """
    _wrappers.append(kind)


class Walk:
    """Find the values that ``roots`` lead to: nearest first, each once, no plain ones.

    Roots, and the objects of methods among them, are followed whosever they are.

    Args:
        roots: where the walk begins. A class leads to its attributes.

    Attributes:
        values: all values, also those that lead to nothing.
        places: where values are referred to. Slots, variables, globals and attributes
            of classes are among them whatever their value is.
        containers: containers and ``__dict__`` of objects, with the number of the value
            that they are, or belong to, and the kind of their entries.
        classes: classes of the user.
        modules: all modules.
        tensors: all tensors, by ``id``.
        weights: the ``id`` of parameters, and of tensors of quantised parameters.
        threaded: the numbers of the user's objects that have threads.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.values: list[Any] = []
        self.places: list[Place] = []
        self.containers: list[tuple[int, PlaceKind, Any]] = []
        self.classes: set[type] = set()
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, Tensor] = {}
        self.weights: set[int] = set()
        self.threaded: list[int] = []
        self._depths: list[int] = []
        self._first_places: list[Place | None] = []
        # The ``id`` of values; of a global also its name.
        self._seen: set[Any] = {id(UNSET)}
        self._root_ids: set[int] = set()
        for root in roots:
            # A method is given for its object, even if that is a library's Trainer.
            self._root_ids |= {id(root), id(read_attribute(root, "__self__"))}
            self._add(root, None, 0)
        for number, value in enumerate(self.values):  # which grow
            if self._depths[number] <= LONGEST_CHAIN:
                try:  # contextlib.suppress takes longer than a short list
                    self._record(number, value)
                except Exception:
                    continue  # a user's object may raise, whatever it is asked for

    def _add(self, value: Any, place: Place | None, depth: int) -> None:
        """Add a value that a place refers to, unless it is known."""
        if id(value) in self._seen or type(value) in PLAIN:
            return
        # By id: a value may have no hash. ``values`` keeps it alive, so ids are unique.
        self._seen.add(id(value))
        self.values.append(value)
        self._depths.append(depth)
        self._first_places.append(place)

    def _record(self, number: int, value: Any) -> None:
        """Record the places to which a value leads, and add their values."""
        value_class: Any = type(value)
        # A weak reference is none of its object, a decorator's proxy is its function.
        if not issubclass(value_class, _WEAK_REFERENCES):
            value_class = value.__class__
        follow = _follower_of(value_class)
        for kind, holder, key, content in follow(self, number, value):
            # A plain value is that of a variable alone, which calls may rebind.
            if type(content) in PLAIN and kind not in VARIABLES:
                continue
            place = Place(kind, holder, key, content, number)
            self.places.append(place)
            self._add(content, place, self._depths[number] + 1)

    # --- what values lead to, by class: the kind, holder, key and value of places ---

    def _follow_nothing(self, number: int, value: Any) -> Iterable[Entry]:
        return ()

    def _follow_entries(
        self, number: int, container: Any, kind: PlaceKind
    ) -> Iterator[Entry]:
        """Save a container or ``__dict__``, and follow its entries."""
        if len(container) > _MAX_SAVED_ENTRIES:
            return
        self.containers.append((number, kind, container))
        if len(container) > MAX_ENTRIES:  # its entries are those of a log
            return
        # A list, because an entry that is imported lazily may add others.
        items = [*entries_of(container)]
        # A loop of C first: an entry of a log holds nothing but numbers.
        if PLAIN.issuperset(map(type, chain.from_iterable(items))):
            return
        if isinstance(container, set):
            kind = PlaceKind.KEY
        for key, entry in items:
            yield PlaceKind.KEY, container, key, key
            yield kind, container, key, entry

    def _follow_container(self, number: int, container: Any) -> Iterator[Entry]:
        if getattr(type(container), "__getitem__", None) in _GETTERS:
            yield from self._follow_entries(number, container, PlaceKind.ENTRY)
        if hasattr(container, "__dict__"):  # of a subclass
            yield from self._follow_attributes(number, container)

    def _follow_attributes(self, number: int, value: Any) -> Iterable[Entry]:
        """Follow the ``__dict__`` of an object."""
        return self._follow_entries(number, attributes_of(value), PlaceKind.ATTRIBUTE)

    def _follow_tensor(self, number: int, tensor: Tensor) -> Iterator[Entry]:
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter:
            self.weights.add(id(tensor))
        is_weight = id(tensor) in self.weights
        # The parts of a trained one are refused where replicas are made, by name.
        if is_weight and not tensor.requires_grad:
            yield from self._follow_quantised(tensor)
        is_made_of_others = is_composite(tensor)
        # Such a weight has no values of its own.
        if not (is_weight and is_made_of_others):
            self.tensors[id(tensor)] = tensor
        # What a subclass consists of is no attribute, except a parameter's.
        if is_parameter or not is_made_of_others:
            yield from self._follow_attributes(number, tensor)

    def _follow_quantised(self, weight: Any) -> Iterator[Entry]:
        """Follow the tensors in a frozen quantised parameter, or in its state."""
        for part in tensors_in(weight):
            # An object of a library is followed as a root is.
            ids = self.weights if isinstance(part, Tensor) else self._root_ids
            ids.add(id(part))
            yield PlaceKind.PART, weight, "quantised", part

    def _follow_module(self, number: int, module: Any) -> Iterator[Entry]:
        is_wrapper = isinstance(module, tuple(_wrappers))
        # An engine restores itself, so only the user's module is followed.
        original = module.module if is_wrapper else unwrapped(module)[0]
        if original is not module:
            yield PlaceKind.PART, module, "", original
            return
        self.modules.append(module)
        # Networks may be deeper than the chains of objects in data.
        self._depths[number] = 0
        yield from self._follow_instance(number, module)

    def _follow_view(self, number: int, view: Any) -> Iterator[Entry]:
        # Nothing else tells which dictionary it is of.
        for container in gc.get_referents(view):
            yield PlaceKind.PART, view, "of", container

    def _follow_array(self, array: Any) -> Iterator[Entry]:
        """Follow the objects in an array of NumPy."""
        if array.dtype.hasobject and array.size <= MAX_ENTRIES:
            for index, entry in enumerate(array.flat):
                yield PlaceKind.PART, array, index, entry

    def _follow_object(self, number: int, value: Any) -> Iterator[Entry]:
        yield from self._follow_parts(number, value)
        kind: Any = type(value)
        if is_array(kind):
            yield from self._follow_array(value)
        if is_state(value):
            yield from self._follow_quantised(value)
        elif id(value) not in self._root_ids:
            owner = whose(value)
            if owner is Whose.THREADS and is_user_class(kind):
                self.threaded.append(number)
            if owner is Whose.LIBRARY:
                yield from self._follow_files(value)
            if owner is not Whose.USER:
                return
        yield from self._follow_instance(number, value)

    def _follow_files(self, value: Any) -> Iterator[Entry]:
        """Follow the files that a library's object reads or writes, as an archive."""
        # Looks drop what loggers are given.
        if isinstance(value, logging.Handler):
            return
        attributes = attributes_of(value)
        for name, part in attributes.items():
            if isinstance(part, io.IOBase):
                yield PlaceKind.ATTRIBUTE, attributes, name, part

    def _follow_instance(self, number: int, value: Any) -> Iterator[Entry]:
        """Follow the attributes and slots of an object, and its class."""
        yield from self._follow_attributes(number, value)
        kind: Any = type(value)
        for slot in _descriptors_of(kind):
            content = Place(PlaceKind.SLOT, value, slot, None, number).read()
            yield PlaceKind.SLOT, value, slot, content
        yield from self._follow_class(number, kind)

    def _follow_class(self, number: int, kind: type) -> Iterator[Entry]:
        """Follow a class and its bases of the user: values, and what methods name."""
        for base in kind.__mro__:
            is_followed = is_user_class(base) or id(base) in self._root_ids
            if base in self.classes or not is_followed:
                continue
            self.classes.add(base)
            # A list, because a class may make attributes when they are read.
            for name, attribute in [*vars(base).items()]:
                part = function_of(attribute) or attribute
                if hasattr(type(part), "__get__"):  # a descriptor may have values
                    yield PlaceKind.PART, base, name, part
                elif not (name.startswith("__") or isinstance(part, type)):
                    yield PlaceKind.CLASS, base, name, part

    def _follow_function(
        self, number: int, function: types.FunctionType
    ) -> Iterator[Entry]:
        is_users = not is_library(function.__module__)
        is_users |= id(function) in self._root_ids
        variables = function.__code__.co_freevars
        for name, cell in zip(variables, function.__closure__ or (), strict=True):
            content = Place(PlaceKind.CELL, cell, name, None, number).read()
            # A library's decorator leads to the user's function.
            if is_users or isinstance(content, _FUNCTIONS):
                yield PlaceKind.CELL, cell, name, content
        if not is_users:
            return
        # Cells are places of their own above; what is left are defaults.
        for name, value in parts_of(function).closure.items():
            if name not in variables:
                yield PlaceKind.PART, function, name, value
        yield from self._follow_attributes(number, function)
        # functools.wraps gives a library's wrapper the user's ``__module__``.
        if not is_library(function.__globals__.get("__name__")):
            yield from self._follow_globals(function)

    def _follow_globals(self, function: types.FunctionType) -> Iterator[Entry]:
        namespace = function.__globals__
        yield from self._variables(namespace, globals_named_in(function.__code__))
        # Variables and functions of the user's modules, as in ``helpers.count``.
        names = names_in(function.__code__)
        values = [namespace.get(name, sys.modules.get(name)) for name in names]
        modules: set[types.ModuleType] = set()
        for module in values:  # which grow
            if not isinstance(module, types.ModuleType) or module in modules:
                continue
            if is_library(module.__name__):
                continue
            modules.add(module)
            named = names & vars(module).keys()
            values += map(vars(module).get, named)
            yield from self._variables(vars(module), named)

    def _variables(
        self, namespace: dict[str, Any], names: Iterable[str]
    ) -> Iterator[Entry]:
        for name in names:
            value = namespace.get(name, UNSET)
            is_builtin = value is UNSET and hasattr(builtins, name)
            key = id(namespace), name
            if not is_builtin and key not in self._seen:
                self._seen.add(key)
                yield PlaceKind.GLOBAL, namespace, name, value

    def _follow_queue(self, number: int, value: Any) -> Iterator[Entry]:
        yield PlaceKind.ATTRIBUTE, vars(value), "queue", value.queue

    def _follow_parts(self, number: int, value: Any) -> Iterator[Entry]:
        """Follow what a tuple, method, partial or cached function is made of."""
        if isinstance(value, _BUILTIN_METHODS):  # such as ``losses.append``
            yield PlaceKind.PART, value, "self", value.__self__
        parts = parts_of(value)
        named_parts = [("", parts.called), *parts.bound.items()]
        for key, part in [*named_parts, *enumerate(parts.entries)]:
            yield PlaceKind.PART, value, key, part

    # --- what a caller asks ---

    def name_of(self, number: int) -> str:
        """The name of a value: its path from a root; empty for a root."""
        place = self._first_places[number]
        return "" if place is None else self.name_of_place(place)

    def name_of_place(self, place: Place) -> str:
        """The name of a place in the user's words, as ``layers.0.history['loss']``."""
        if place.kind in (PlaceKind.CELL, PlaceKind.GLOBAL):
            return str(place.key)
        outer = self.name_of(place.parent)
        kind = place.kind
        above = self._first_places[place.parent]
        # Users write ``layers.0``, not ``layers._modules['0']``.
        if kind is PlaceKind.ENTRY and above is not None and above.key in _NAMELESS:
            outer = self.name_of(above.parent)
            kind = PlaceKind.ATTRIBUTE
        key = getattr(place.key, "__name__", place.key)  # of a slot
        if kind is PlaceKind.PART:
            return outer or str(key)
        if kind in (PlaceKind.ENTRY, PlaceKind.KEY):
            return f"{outer}[{key!r}]"
        return f"{outer}.{key}" if outer else str(key)


# A dictionary that user code may read, and others write.
_VIEWS: Any = types.MappingProxyType, *map(type, ({}.keys(), {}.values(), {}.items()))
_WEAK_REFERENCES: Any = (
    weakref.ref,
    *weakref.ProxyTypes,
)  # they do not hold their objects
# The first row that fits counts.
_FOLLOWERS: tuple[tuple[Any, Callable[..., Iterable[Entry]]], ...] = (
    ((*_WEAK_REFERENCES, types.ModuleType), Walk._follow_nothing),
    (Tensor, Walk._follow_tensor),
    ((dict, list, deque, set), Walk._follow_container),
    (nn.Module, Walk._follow_module),
    (types.FunctionType, Walk._follow_function),
    (type, Walk._follow_class),
    (queue.Queue, Walk._follow_queue),  # of its parts only one is no lock
    (_VIEWS, Walk._follow_view),
    (types.MethodType, Walk._follow_parts),  # its attributes are its function's
    (object, Walk._follow_object),
)


@functools.lru_cache(maxsize=1024)  # values of one class are thousands
def _follower_of(kind: type) -> Callable[..., Iterable[Entry]]:
    """The method that follows values of a class."""
    return next(follow for kinds, follow in _FOLLOWERS if issubclass(kind, kinds))


@functools.lru_cache(maxsize=1024)  # objects of one class are many
def _descriptors_of(kind: type) -> list[Any]:
    """The descriptors of slots in a class and its bases."""
    slots: list[Any] = []
    for base in kind.__mro__:
        # Members of a class in C may be read-only, and numbers that are new objects in
        # each read, as ``complex.real`` and a pattern's flags.
        if "__slots__" not in vars(base):
            continue
        for name, slot in vars(base).items():
            # Python's own members, such as a partial's, have no values of the user.
            is_slot = isinstance(slot, types.MemberDescriptorType)
            if is_slot and not name.startswith("__"):
                slots.append(slot)
    return slots


def function_of(attribute: Any) -> Any:
    """The function of a class's attribute, if it is a method or property."""
    if isinstance(attribute, (staticmethod, classmethod)):
        attribute = attribute.__func__
    if isinstance(attribute, property):
        attribute = attribute.fget
    if isinstance(attribute, functools.cached_property):
        attribute = attribute.func
    return attribute if isinstance(attribute, types.FunctionType) else None
