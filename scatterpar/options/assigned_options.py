"""Options of an engine that are set after its construction.

An option is an attribute that the engine reads in every step, or something that the
constructor made of it. ::

    engine.accum = 4          checked as in the constructor; holds from the next step on
    engine.device_ids = …     AttributeError: replicas were made for these devices

What has no effect any more must not be accepted in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import MethodType
from typing import Any


def option(name: str) -> Any:
    """An attribute whose assignment calls ``engine._assign(name, value)``.

    Its value is in ``engine._options``. No Python function runs when it is read.
    """

    def assign(engine: Any, value: Any) -> None:
        engine._assign(name, value)

    return property(attrgetter(f"_options.{name}"), assign)


def fixed(argument: str) -> Any:
    """An attribute that only the constructor sets, by the ``argument`` of this name."""

    def refuse(engine: Any, value: Any) -> None:
        raise _cannot_be_set(argument, value)

    return property(attrgetter(f"_options.{argument}"), refuse)


class FixedArgument:
    """An argument of the constructor whose name is that of no attribute.

    ``method`` is that of ``nn.Module`` with this name, which an assignment would hide.
    """

    def __init__(self, name: str, method: Callable[..., Any] | None = None) -> None:
        self._name = name
        self._method = method

    def __get__(self, engine: Any, owner: type) -> Any:
        if self._method is None:
            raise AttributeError(self._name)
        return self._method if engine is None else MethodType(self._method, engine)

    def __set__(self, engine: Any, value: Any) -> None:
        raise _cannot_be_set(self._name, value)


def _cannot_be_set(argument: str, value: Any) -> AttributeError:
    return AttributeError(
        f"{argument} = {value!r:.60} cannot be set later, since replicas were made "
        f"with another value; make another engine, with {argument}="
    )
