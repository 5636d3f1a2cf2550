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
from typing import Any


def option(name: str) -> Any:
    """An attribute whose assignment calls ``engine._assign(name, value)``.

    Its value is in ``engine._options``. No Python function runs when it is read.
    """

    def assign(engine: Any, value: Any) -> None:
        engine._assign(name, value)

    doc = f"The constructor's ``{name}=``. A new value holds from the next step on."
    return property(attrgetter(f"_options.{name}"), assign, doc=doc)


def fixed(argument: str, get: Callable[[Any], Any] | None = None) -> Any:
    """An attribute that only the constructor sets, by the ``argument`` of this name.

    It reads ``engine._options``, or what ``get`` returns for the engine.
    """

    def refuse(_: Any, value: Any) -> None:
        raise AttributeError(
            f"{argument} = {value!r:.60} cannot be set later, since replicas were made "
            f"with another value; make another engine, with {argument}="
        )

    doc = f"The constructor's ``{argument}=``, which cannot be set later."
    if get:
        return property(get, refuse, doc="A method of ``nn.Module``.")
    return property(attrgetter(f"_options.{argument}"), refuse, doc=doc)
