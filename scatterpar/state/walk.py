"""What roots lead to, and the places that refer to it.

::

    value                       leads by these places to others
    the user's object, module   ATTRIBUTE, SLOT; and CLASS, of its class
    list, dict, deque, set      ENTRY, KEY
    the user's function         CELL, GLOBAL; PART: its defaults
    tuple, partial, method      PART: cannot be written, but be made again
    tensor                      ATTRIBUTE; PART, of a quantised one
    a library's function        CELL: functions and modules that it closes over
    a library's object, data    nothing, unless it is a root

``parts_of`` says what values are made of, ``whose`` which objects are the user's.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import queue
import sys
import types
import weakref
from collections import deque
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from scatterpar.replicas.quantised import is_composite, is_state, tensors_in
from scatterpar.replicas.references import (
    MAX_ENTRIES,
    contents,
    globals_named_in,
    names_in,
    parts_of,
    read_attribute,
)
from scatterpar.replicas.snapshot import PLAIN
from scatterpar.state.whose import (
    Whose,
    attributes_of,
    is_library,
    is_user_class,
    whose,
)
from scatterpar.torch_private import is_compiled_module, unwrapped

# A chain of objects is as long as this at most: a longer one is data, such as a linked
# list. Modules begin a new chain, because networks may be deep.
DEPTH = 16
# The saved references of such a list take 8 MB.
_MAX_SAVED_ENTRIES = 2**20  # of a container: a longer one is data
UNSET = object()  # the value of a place that has none
# Classes that override this compute their items, such as a library's table of classes.
_GETTERS = dict.__getitem__, list.__getitem__, deque.__getitem__, None
# By class: a subclass may have attributes, or compute its items.
_BUILTIN_CONTAINERS = {dict, list, deque, set}
# What a library's decorator may call of the user's.
_FUNCTIONS = types.FunctionType, types.MethodType, nn.Module
_BUILTIN_METHODS = types.BuiltinMethodType, types.MethodWrapperType
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
    def is_writable(self) -> bool:
        """Whether another value can be written here."""
        return self.kind not in (PlaceKind.KEY, PlaceKind.PART)

    def read(self) -> Any:
        """The present value; ``UNSET`` if there is none."""
        try:
            # By the descriptor: a subclass may have an attribute of the slot's name.
            if self.kind is PlaceKind.SLOT:
                return self.key.__get__(self.holder)
            if self.kind is PlaceKind.CELL:
                return self.holder.cell_contents
            if self.kind is PlaceKind.CLASS:
                return vars(self.holder)[self.key]
            return self.holder[self.key]
        except (AttributeError, LookupError, ValueError):
            # Attributes and entries may be gone, and a cell may be empty.
            return UNSET

    def write(self, value: Any) -> None:
        """Write a value. ``UNSET`` removes the present one."""
        if value is UNSET:
            with contextlib.suppress(AttributeError, LookupError, ValueError):
                self._remove()
        elif self.kind is PlaceKind.SLOT:
            self.key.__set__(self.holder, value)
        elif self.kind is PlaceKind.CELL:
            self.holder.cell_contents = value
        elif self.kind is PlaceKind.CLASS:
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value

    def _remove(self) -> None:
        if self.kind is PlaceKind.SLOT:
            self.key.__delete__(self.holder)
        elif self.kind is PlaceKind.CELL:
            del self.holder.cell_contents
        elif self.kind is PlaceKind.CLASS:
            delattr(self.holder, self.key)
        else:
            del self.holder[self.key]


_wrappers: list[type[nn.Module]] = []


def register_wrapper(kind: type[nn.Module]) -> None:
    """Walk ``wrapper.module`` in the place of wrappers of this class.

    An engine registers itself, because it restores its own state.
    """
    _wrappers.append(kind)


class Walk:
    """What ``roots`` lead to, nearest first, each value once, without plain values.

    Roots, and the objects of methods among them, are followed whosever they are.

    Args:
        roots: where the walk begins. A class leads to its attributes.
        excluded: names of attributes of roots that are not followed.
        enters_modules: whether modules that are no roots lead to what they hold.

    Attributes:
        values: all values, also those that lead to nothing.
        places: where values are referred to. Slots, variables, globals and attributes
            of classes are among them whatever their value is.
        containers: containers and ``__dict__`` of objects, by the number of the value
            that they are, or belong to.
        classes: classes of the user, by their number.
        modules: all modules.
        tensors: all tensors, by ``id``.
        weights: the ``id`` of parameters, and of tensors of quantised parameters.
        threaded: the numbers of the user's objects that have threads.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        *,
        excluded: Container[str] = (),
        enters_modules: bool = True,
    ) -> None:
        self.values: list[Any] = []
        self.places: list[Place] = []
        self.containers: list[tuple[int, Any]] = []
        self.classes: list[tuple[int, type]] = []
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, Tensor] = {}
        self.weights: set[int] = set()
        self.threaded: list[int] = []
        self._excluded = excluded
        self._enters_modules = enters_modules
        self._depths: list[int] = []
        self._first_places: list[Place | None] = []
        self._seen: set[int] = set()
        self._seen_globals: set[tuple[int, str]] = set()
        self._seen_classes: set[int] = set()
        self._root_ids: set[int] = set()
        for root in roots:
            # A method is given for its object, even if that is a library's Trainer.
            self._root_ids |= {id(root), id(read_attribute(root, "__self__"))}
            self._add(root, None, 0)
        self._follow_all()

    def _follow_all(self) -> None:
        for number, value in enumerate(self.values):  # which grow
            if self._depths[number] <= DEPTH:
                try:  # contextlib.suppress takes longer than a short list
                    self._follow(number, value)
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

    def _refer(
        self, kind: PlaceKind, holder: Any, key: Any, value: Any, parent: int
    ) -> None:
        """Record a place, and add its value.

        A plain value is that of a variable alone, which calls may rebind.
        """
        if type(value) in PLAIN and kind not in VARIABLES:
            return
        place = Place(kind, holder, key, value, parent)
        self.places.append(place)
        # Not ``_add`` at once: most values are known, or in a long list of others.
        if id(value) not in self._seen and value is not UNSET:
            self._add(value, place, self._depths[parent] + 1)

    def _follow(self, number: int, value: Any) -> None:
        """Record the places to which a value leads."""
        if type(value) in _BUILTIN_CONTAINERS:  # which most values are
            self._follow_entries(number, value, PlaceKind.ENTRY)
            return
        # Before all others, because a proxy claims to be of its object's class.
        if type(value) in weakref.ProxyTypes or isinstance(value, weakref.ref):
            return  # it does not hold its object
        if isinstance(value, Tensor):
            self._follow_tensor(number, value)
        elif isinstance(value, (dict, list, deque, set)):
            self._follow_container(number, value)
        elif isinstance(value, nn.Module):
            self._follow_module(number, value)
        elif isinstance(value, types.FunctionType):
            self._follow_function(number, value)
        elif isinstance(value, type):
            # Functions may write attributes of a class that they name.
            if id(value) in self._root_ids or is_user_class(value):
                self._follow_class(number, value)
        elif isinstance(value, queue.Queue):  # of its parts only this is no lock
            attributes = vars(value)
            self._refer(PlaceKind.ATTRIBUTE, attributes, "queue", value.queue, number)
        elif not isinstance(value, types.ModuleType):
            self._follow_parts(number, value)
            if not isinstance(value, types.MethodType):  # its are its function's
                self._follow_object(number, value)

    def _follow_entries(
        self,
        number: int,
        container: Any,
        kind: PlaceKind,
        excluded: Container[str] = (),
    ) -> None:
        """Save a container or ``__dict__``, and follow its entries."""
        if len(container) > _MAX_SAVED_ENTRIES:
            return
        self.containers.append((number, container))
        if len(container) > MAX_ENTRIES:  # its entries are those of a log
            return
        if isinstance(container, set):
            kind = PlaceKind.KEY
        is_dict = isinstance(container, dict)
        # A list, because an entry that is imported lazily may add others.
        items = [*(container.items() if is_dict else enumerate(container))]
        # A loop of C first: an entry of a log holds nothing but numbers.
        if PLAIN.issuperset(map(type, chain.from_iterable(items))):
            return
        for key, entry in items:
            if key not in excluded:
                self._refer(PlaceKind.KEY, container, key, key, number)
                self._refer(kind, container, key, entry, number)

    def _follow_container(self, number: int, container: Any) -> None:
        if getattr(type(container), "__getitem__", None) in _GETTERS:
            self._follow_entries(number, container, PlaceKind.ENTRY)
        if hasattr(container, "__dict__"):  # of a subclass
            self._follow_attributes(number, attributes_of(container))

    def _follow_attributes(self, number: int, attributes: dict[str, Any]) -> None:
        """Follow the ``__dict__`` of an object, which may be a root."""
        is_root = id(self.values[number]) in self._root_ids
        excluded = self._excluded if is_root else ()
        self._follow_entries(number, attributes, PlaceKind.ATTRIBUTE, excluded)

    def _follow_tensor(self, number: int, tensor: Tensor) -> None:
        is_parameter = isinstance(tensor, nn.Parameter)
        is_weight = is_parameter or id(tensor) in self.weights
        # The parts of a trained one are refused where replicas are made, by name.
        if is_weight and not tensor.requires_grad:
            self._follow_quantised(number, tensor)
        # A weight that consists of others has no values of its own.
        if not (is_weight and is_composite(tensor)):
            self.tensors[id(tensor)] = tensor
            if is_weight:
                self.weights.add(id(tensor))
        # What a subclass consists of is no attribute, except a parameter's.
        if is_parameter or not is_composite(tensor):
            self._follow_attributes(number, vars(tensor))

    def _follow_quantised(self, number: int, weight: Any) -> None:
        """Follow the tensors in a frozen quantised parameter, or in its state."""
        for part in tensors_in(weight):
            if isinstance(part, Tensor):
                self.weights.add(id(part))
            else:
                self._root_ids.add(id(part))  # it is a library's
            self._refer(PlaceKind.PART, weight, "quantised", part, number)

    def _follow_module(self, number: int, module: nn.Module) -> None:
        # An engine restores itself, so only the user's module is followed.
        if isinstance(module, tuple(_wrappers)):
            self._refer(PlaceKind.PART, module, "", module.module, number)
            return
        if is_compiled_module(module):
            original, _ = unwrapped(module)
            self._refer(PlaceKind.PART, module, "", original, number)
            return
        self.modules.append(module)
        # A lender exchanges whole modules, whose contents replicas have themselves.
        if not self._enters_modules and id(module) not in self._root_ids:
            return
        # Networks may be deeper than the chains of objects in data.
        self._depths[number] = 0
        self._follow_attributes(number, vars(module))
        if is_user_class(type(module)):
            self._follow_slots(number, module)
            self._follow_class(number, type(module))

    def _follow_object(self, number: int, value: Any) -> None:
        is_root = id(value) in self._root_ids
        if is_state(value):
            self._follow_quantised(number, value)
        elif not is_root:
            owner = whose(value)
            if owner is Whose.THREADS and is_user_class(type(value)):
                self.threaded.append(number)
            if owner is not Whose.USER:
                return
        self._follow_attributes(number, attributes_of(value))
        self._follow_slots(number, value)
        if is_user_class(type(value)):
            self._follow_class(number, type(value))

    def _follow_slots(self, number: int, value: Any) -> None:
        kind: Any = type(value)
        for slot in _slots_of(kind):
            content = Place(PlaceKind.SLOT, value, slot, None, number).read()
            self._refer(PlaceKind.SLOT, value, slot, content, number)

    def _follow_class(self, number: int, kind: type) -> None:
        """Follow a class and its bases of the user: values, and what methods name."""
        for base in kind.__mro__:
            # The class itself may be a library's, if it is a root.
            is_followed = base is kind or is_user_class(base)
            if id(base) in self._seen_classes or not is_followed:
                continue
            self._seen_classes.add(id(base))
            self.classes.append((number, base))
            # A list, because a class may make attributes when they are read.
            for name, attribute in [*vars(base).items()]:
                function = function_of(attribute)
                if function is not None:
                    self._refer(PlaceKind.PART, base, name, function, number)
                elif name.startswith("__") or isinstance(attribute, type):
                    continue
                elif not hasattr(type(attribute), "__get__"):
                    self._refer(PlaceKind.CLASS, base, name, attribute, number)
                elif is_user_class(type(attribute)):  # a descriptor may have values
                    self._refer(PlaceKind.PART, base, name, attribute, number)

    def _follow_function(self, number: int, function: types.FunctionType) -> None:
        is_users = not is_library(function.__module__)
        is_users |= id(function) in self._root_ids
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            content = contents(cell)
            value = UNSET if content is cell else content
            # A library's decorator leads to the user's function.
            if is_users or isinstance(value, _FUNCTIONS):
                self._refer(PlaceKind.CELL, cell, name, value, number)
        if not is_users:
            return
        # Cells are places of their own above; what is left are defaults.
        for name, value in parts_of(function).closure.items():
            if name not in function.__code__.co_freevars:
                self._refer(PlaceKind.PART, function, name, value, number)
        self._follow_attributes(number, vars(function))
        self._follow_globals(number, function)

    def _follow_globals(self, number: int, function: types.FunctionType) -> None:
        namespace = function.__globals__
        # functools.wraps gives a library's wrapper the user's ``__module__``.
        if is_library(namespace.get("__name__")):
            return
        for name in globals_named_in(function.__code__):
            self._refer_global(namespace, name, number)
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
            for name in names & vars(module).keys():
                self._refer_global(vars(module), name, number)
                values.append(vars(module)[name])

    def _refer_global(self, namespace: dict[str, Any], name: str, number: int) -> None:
        value = namespace.get(name, UNSET)
        is_builtin = value is UNSET and hasattr(builtins, name)
        key = id(namespace), name
        if not is_builtin and key not in self._seen_globals:
            self._seen_globals.add(key)
            self._refer(PlaceKind.GLOBAL, namespace, name, value, number)

    def _follow_parts(self, number: int, value: Any) -> None:
        """Follow what a tuple, method, partial or cached function is made of."""
        if isinstance(value, _BUILTIN_METHODS):  # such as ``losses.append``
            # Of a function it is a module, or torch's class of functions.
            if not isinstance(value.__self__, (types.ModuleType, type)):
                self._refer(PlaceKind.PART, value, "self", value.__self__, number)
            return
        parts = parts_of(value)
        named_parts = [("", parts.called), *parts.bound.items()]
        for key, part in [*named_parts, *enumerate(parts.entries)]:
            self._refer(PlaceKind.PART, value, key, part, number)

    # --- what a caller asks ---

    def name_of(self, number: int) -> str:
        """The name of a value: its path from a root; empty for a root."""
        place = self._first_places[number]
        return "" if place is None else self.name_of_place(place)

    def name_of_place(self, place: Place) -> str:
        """The name of a place in the user's words, as ``layers.0.history['loss']``."""
        if place.kind in (PlaceKind.CELL, PlaceKind.GLOBAL):
            return str(place.key)
        return self.name_of_entry(place.parent, place.kind, place.key)

    def name_of_entry(self, parent: int, kind: PlaceKind, key: Any) -> str:
        """The name of an entry or attribute of the value with this number."""
        outer = self.name_of(parent)
        key = getattr(key, "__name__", key)  # of a slot
        above = self._first_places[parent]
        # Users write ``layers.0``, not ``layers._modules['0']``.
        if above is not None and above.key in _NAMELESS and kind is PlaceKind.ENTRY:
            outer = self.name_of(above.parent)
            kind = PlaceKind.ATTRIBUTE
        if kind is PlaceKind.PART:
            return outer or str(key)
        if kind in (PlaceKind.ENTRY, PlaceKind.KEY):
            return f"{outer}[{key!r}]"
        return f"{outer}.{key}" if outer else str(key)


@functools.lru_cache(maxsize=1024)  # objects of one class are many
def _slots_of(kind: type) -> list[Any]:
    """The descriptors of slots in a class and its bases."""
    slots: list[Any] = []
    for base in kind.__mro__:
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
