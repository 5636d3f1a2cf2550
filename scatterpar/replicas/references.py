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
    """What a value refers to, and a function that makes another one of such things.

    A value of a kind that is not known refers to nothing.
    """
    # First, because a proxy claims to be of its object's class.
    if type(value) in weakref.ProxyTypes:
        return _of_proxy(value), weakref.proxy
    if isinstance(value, types.MethodType):  # its function may be a closure
        return (value.__func__, value.__self__), types.MethodType
    if type(value) in (weakref.ref, weakref.WeakMethod):
        return (value(),), type(value)
    if type(value) is weakref.WeakKeyDictionary:
        return (vars(value)["data"],), _weak_dictionary
    if isinstance(value, _CACHED_FUNCTION):  # each copy has a cache of its own
        return (value.__wrapped__,), functools.lru_cache(**value.cache_parameters())
    if type(value) is functools.partial:
        bind = functools.partial(_partial, len(value.args), list(value.keywords))
        return (value.func, *value.args, *value.keywords.values()), bind
    if isinstance(value, tuple):
        return value, functools.partial(_tuple_of, type(value))
    if isinstance(value, types.FunctionType):
        return _of_function(value), type  # ``ModuleCopy`` makes another one
    return (), type


def _weak_dictionary(data: dict[Any, Any]) -> Any:
    """A dictionary that refers to its keys weakly, as those of ``data`` do."""
    made: Any = weakref.WeakKeyDictionary()
    made.data = data
    return made


def _partial(num_args: int, names: Sequence[str], function: Any, *bound: Any) -> Any:
    """A partial that binds arguments by position, then those with ``names``."""
    keywords = dict(zip(names, bound[num_args:], strict=True))
    return functools.partial(function, *bound[:num_args], **keywords)


def _of_function(function: types.FunctionType) -> list[Any]:
    """The contents of a function's cells, and its defaults."""
    referred = [contents(cell) for cell in function.__closure__ or ()]
    referred += function.__defaults__ or ()
    referred += (function.__kwdefaults__ or {}).values()
    return referred


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
