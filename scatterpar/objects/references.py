"""The parts of a value: the values to which it refers.

``parts_of`` is the one function that knows kinds of values. What a walk follows depends
on its question: ``reach.py`` lists them. Two that do not walk follow parts, too::

    ModuleCopy        weak references and closures, since a copy refers to copies.
                      It warns of globals, which it cannot exchange
    a graph's state   closures and attributes, not further: it is compared in each step
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from scatterpar.batch.nested import sequence_like

_NO_ATTRIBUTES: Mapping[str, Any] = types.MappingProxyType({})


class References(NamedTuple):
    """The parts of a value, by the kind of reference.

    Attributes:
        called: the function that a method, a partial or a cache calls; else ``None``.
        bound: its object or arguments, by name.
        weak: the object of a weak reference or proxy.
        closure: closure variables and defaults of a function, by name.
        file_globals: the globals that its code names.
        attributes: ``__dict__``.
        entries: the entries of a container; values, not keys.
        make: makes another value of this kind from others than ``made_of()``; ``None``
            for a value that can be changed in place.
    """

    called: Any = None
    bound: Mapping[str, Any] = _NO_ATTRIBUTES
    weak: Sequence[Any] = ()
    closure: Mapping[str, Any] = _NO_ATTRIBUTES
    file_globals: Mapping[str, Any] = _NO_ATTRIBUTES
    attributes: Mapping[str, Any] = _NO_ATTRIBUTES
    entries: Collection[Any] = ()
    make: Callable[..., Any] | None = None

    def made_of(self) -> list[Any]:
        """The arguments of ``make``; empty if there is no ``make``."""
        if self.make is None:
            return []
        called = [] if self.called is None else [self.called]
        return [*called, *self.bound.values(), *self.weak, *self.entries]


# Of Python's own classes: a subclass may do more when it is changed.
MUTABLE_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
CONTAINERS = (list, set, frozenset, deque, dict, tuple)
_CachedFunction = type(functools.lru_cache(len))
_WEAK = {
    weakref.ref,
    weakref.WeakMethod,
    weakref.KeyedRef,
    *weakref.ProxyTypes,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
}


def parts_of(value: Any) -> References:
    """The direct parts of ``value``."""
    # By ``type``: a proxy claims to be of its object's class.
    kind = type(value)
    if kind in _WEAK:
        return _weak_parts_of(value)
    if kind is types.MethodType:
        # Without attributes: the ``__dict__`` of a method is that of its function.
        bound = {"self": value.__self__}
        return References(value.__func__, bound, make=types.MethodType)
    attributes = read_attribute(value, "__dict__", _NO_ATTRIBUTES)
    if kind is types.FunctionType:
        closure, file_globals = _variables_of(value)
        return References(
            closure=closure, file_globals=file_globals, attributes=attributes
        )
    if kind is functools.partial:
        bound = {f"argument {k}": argument for k, argument in enumerate(value.args)}
        bound |= value.keywords
        make = functools.partial(_partial, len(value.args), list(value.keywords))
        return References(value.func, bound, attributes=attributes, make=make)
    if kind is _CachedFunction:
        # Each copy has a cache of its own.
        make_cached = functools.lru_cache(**value.cache_parameters())
        return References(value.__wrapped__, attributes=attributes, make=make_cached)
    # Containers alone may have subclasses: another class has its own constructor.
    if issubclass(kind, dict):
        return References(entries=value.values(), attributes=attributes)
    if issubclass(kind, tuple):
        make_tuple = functools.partial(_tuple_of, value)
        return References(entries=value, attributes=attributes, make=make_tuple)
    if issubclass(kind, CONTAINERS):
        make_set = _frozenset_of if kind is frozenset else None
        return References(entries=value, attributes=attributes, make=make_set)
    return References(attributes=attributes)


def _weak_parts_of(value: Any) -> References:
    """The parts of a weak reference, proxy, dictionary or set."""
    kind = type(value)
    if kind in weakref.ProxyTypes:
        return References(weak=_object_of(value), make=weakref.proxy)
    if kind is weakref.KeyedRef:  # an entry of a ``WeakValueDictionary``
        return References(
            weak=(value(),), make=functools.partial(_keyed_ref, value.key)
        )
    if issubclass(kind, weakref.ref):
        return References(weak=(value(),), make=kind)
    make = functools.partial(_weak_container, kind)
    return References(bound={"data": value.data}, make=make)


@functools.lru_cache(maxsize=16384)  # values of one class are thousands
def is_array(kind: type) -> bool:
    """Whether values of a class are arrays of NumPy."""
    # By its protocol, because this package does not import NumPy.
    return hasattr(kind, "__array_interface__") and hasattr(kind, "flags")


def read_attribute(value: Any, name: str, default: Any = None) -> Any:
    """An attribute of a user's object, whose ``__getattr__`` may raise any error.

    That of a dictionary with ``__getattr__ = dict.__getitem__`` raises ``KeyError``.
    """
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def contents(cell: types.CellType) -> Any:
    """The contents of a cell; the cell itself if its variable is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _variables_of(
    function: types.FunctionType,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A function's closure variables with defaults, and its globals, by name."""
    code = function.__code__
    closure: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = contents(cell)
        if value is not cell:  # else the variable is not bound
            closure[name] = value
    # The last arguments have the defaults.
    positional = reversed(code.co_varnames[: code.co_argcount])
    closure |= zip(positional, reversed(function.__defaults__ or ()), strict=False)
    closure |= function.__kwdefaults__ or {}
    file_globals: dict[str, Any] = {}
    for name in globals_named_in(code):
        if name in function.__globals__:
            file_globals[name] = function.__globals__[name]
    return closure, file_globals


# Reading byte code takes longer than all else here, and each look reads it again. A
# model of transformers leads to thousands of functions: a smaller cache never hits.
@functools.lru_cache(maxsize=16384)
def globals_named_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a code object and the code objects inside it name.

    Those inside it are of functions and comprehensions.
    """
    names: list[str] = []
    for instruction in dis.get_instructions(code):
        # ``co_names`` would not do: attributes are among these names.
        if "GLOBAL" in instruction.opname:
            names.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += globals_named_in(constant)
    return tuple(names)


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals, modules and attributes in a code object, and inside it."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def _keyed_ref(key: Any, entry: Any) -> Any:
    """A weak reference to an entry, as a ``WeakValueDictionary`` keeps it."""
    return weakref.KeyedRef(entry, None, key)  # type: ignore[arg-type]


def _weak_container(kind: Any, data: Any) -> Any:
    """A dictionary or set of a class whose weak references are in ``data``."""
    container = kind()
    container.data = data
    return container


def _partial(num_args: int, names: Sequence[str], function: Any, *bound: Any) -> Any:
    """A partial that binds arguments by position, then those with ``names``."""
    keywords = dict(zip(names, bound[num_args:], strict=True))
    return functools.partial(function, *bound[:num_args], **keywords)


def _object_of(proxy: Any) -> Sequence[Any]:
    """The object of a weak proxy; nothing if the object is gone."""
    try:
        return (proxy.__repr__.__self__,)  # a method that the proxy looks up there
    except ReferenceError:
        return ()


def _frozenset_of(*items: Any) -> frozenset[Any]:
    return frozenset(items)


def _tuple_of(original: Any, *items: Any) -> Any:
    """A tuple of the class and attributes of ``original``."""
    return sequence_like(original, items)


def named_values(function: Any) -> dict[str, Any]:
    """The objects that a function refers to, by name.

    They are bound, closed over, global, or attributes of its object. Those of a module
    are left out, because modules are replicated.
    """
    if isinstance(function, nn.Module):
        return {}
    parts = parts_of(function)
    if parts.called is not None:
        # A method or partial counts as its function: it is no step further away.
        of_function = named_values(parts.called)
        if isinstance(function, types.MethodType):
            return {**of_function, **named_values(function.__self__)}
        return {**of_function, **parts.bound}
    if isinstance(function, types.FunctionType):
        return {**parts.file_globals, **parts.closure}
    return dict(parts.attributes)


def module_of(function: Any) -> nn.Module | None:
    """The module that ``function`` is, or is a method of; ``None`` if there is none."""
    owner = function
    if not isinstance(function, nn.Module):
        owner = read_attribute(function, "__self__")
    return owner if isinstance(owner, nn.Module) else None
