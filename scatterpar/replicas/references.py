"""What functions, methods, partials, tuples and weak references refer to."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

_CACHED_FUNCTION = type(functools.lru_cache(len))


def contents(cell: types.CellType) -> Any:
    """The contents of a cell; the cell itself if its variable is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def references(value: Any) -> tuple[Sequence[Any], Callable[..., Any]]:
    """What a function, method, partial, weak reference or tuple refers to; how to make
    another.
    """
    if (
        type(value) in weakref.ProxyTypes
    ):  # first: it claims to be of its object's class
        return _of_proxy(value), weakref.proxy
    if isinstance(value, types.MethodType):  # its function may be a closure
        return (value.__func__, value.__self__), types.MethodType
    if type(value) in (weakref.ref, weakref.WeakMethod):
        return (value(),), type(value)
    if type(value) is weakref.WeakKeyDictionary:

        def with_data(data: Any) -> Any:
            made: Any = weakref.WeakKeyDictionary()
            made.data = data  # refers to its keys weakly, as the original
            return made

        return (vars(value)["data"],), with_data
    if isinstance(value, _CACHED_FUNCTION):  # each copy has a cache of its own
        return (value.__wrapped__,), functools.lru_cache(**value.cache_parameters())
    if type(value) is functools.partial:

        def bind(function: Any, *parts: Any) -> Any:
            args, rest = parts[: len(value.args)], parts[len(value.args) :]
            return functools.partial(
                function, *args, **dict(zip(value.keywords, rest, strict=True))
            )

        return (value.func, *value.args, *value.keywords.values()), bind
    if isinstance(value, tuple):
        return value, functools.partial(_tuple_of, type(value))
    if isinstance(value, types.FunctionType):  # copied by ``ModuleCopy``
        cells = map(contents, value.__closure__ or ())
        return (
            *cells,
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ), type
    return (), type


def _of_proxy(proxy: Any) -> Sequence[Any]:
    """The object of a weak proxy; nothing if the object is gone."""
    try:
        return (proxy.__repr__.__self__,)  # a method that the proxy looks up there
    except ReferenceError:
        return ()


def _tuple_of(kind: Any, *items: Any) -> Any:
    """A tuple of a class whose constructor may take other arguments than items."""
    make = getattr(kind, "_make", functools.partial(tuple.__new__, kind))
    return make(items)


def module_of(function: Any) -> nn.Module | None:
    """The module that ``function`` is, or is a method of; ``None`` if there is none."""
    owner = (
        function
        if isinstance(function, nn.Module)
        else getattr(function, "__self__", None)
    )
    return owner if isinstance(owner, nn.Module) else None
