"""Functions that close over what is replicated: a hook, or a ``forward`` that was exchanged.

``module.forward = lambda x: old(x)`` runs the user's module, whoever calls it. A replica needs a
twin of the function: the same code, and cells that lead to the replica. Cells that lead elsewhere
stay shared, so that a list that hooks fill is the user's.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Cells", "contents", "leads_to", "names_leading", "twin_of"]

Cells = list[tuple[types.CellType, Any]]


def contents(cell: types.CellType) -> Any:
    """What is in a cell; the cell itself for a variable that is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def leads_to(value: Any, is_inside: Callable[[Any], bool], seen: set[int] | None = None) -> bool:
    """Whether ``value`` is inside of what is replicated, or a function or method that leads there.

    Args:
        value: anything.
        is_inside: whether something is.
        seen: what was asked for already.
    """
    if is_inside(value):
        return True
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(leads_to(one, is_inside, seen) for one in _brought(value))


def _brought(value: Any) -> Iterable[Any]:
    """What a function, or something like one, leads to."""
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if type(value) is weakref.ref:
        return (value(),)
    if type(value) is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    if type(value) is tuple:
        return value
    if isinstance(value, types.FunctionType):
        cells = map(contents, value.__closure__ or ())
        return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return ()


def names_leading(function: types.FunctionType, leads: Callable[[Any], bool]) -> list[str]:
    """Names of its file by which ``function`` comes to what is replicated: its twin would, too."""
    of_file = function.__globals__
    return [n for n in function.__code__.co_names if n in of_file and leads(of_file[n])]


def twin_of(
    function: types.FunctionType,
    leads: Callable[[Any], bool],
    of: Callable[[Any], Any],
    made: dict[int, Any],
) -> tuple[types.FunctionType, Cells]:
    """A twin of ``function`` that leads to a copy, and the cells that do not lead there any more.

    Args:
        function: leads to what is replicated.
        leads: whether a value does.
        of: the copy's counterpart of a value.
        made: has the twin before its cells are filled, for functions that call themselves.
    """

    def brought(value: Any) -> Any:
        return of(value) if leads(value) else value

    old = function.__closure__ or ()
    new = tuple(types.CellType() if leads(contents(cell)) else cell for cell in old)
    twin: Any = types.FunctionType(function.__code__, function.__globals__, closure=new)
    made[id(function)] = twin
    twin.__defaults__ = function.__defaults__ and tuple(map(brought, function.__defaults__))
    twin.__kwdefaults__ = function.__kwdefaults__ and {
        name: brought(value) for name, value in function.__kwdefaults__.items()
    }
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(twin, name, getattr(function, name))
    vars(twin).update(vars(function))
    changed: Cells = []
    for cell, own in zip(old, new, strict=True):
        if own is not cell:
            own.cell_contents = of(cell.cell_contents)
            changed.append((cell, cell.cell_contents))
    return twin, changed
