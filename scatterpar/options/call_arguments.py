"""How ``engine(...)`` and ``engine.map`` read their arguments: as ``forward_backward``.

::

    engine({"x": x, "mask": mask})    module(x=x, mask=mask)
    engine((x, mask))                 module(x, mask)
    engine(x)                         module(x)
    engine((value,))                  module(value), whatever ``value`` is

The methods that take targets and a criterion beside the inputs have keywords of their
own, so the module's are a dict there: ``forward_backward({"x": x, "mask": mask})``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from scatterpar.step.task import arguments_from_inputs

# What loops and libraries call the arguments of a step.
_OTHER_NAMES = {
    "inputs": "input x data batch samples images",
    "targets": "target label labels y gt",
    "criterion": "loss loss_fn loss_func loss_function criteria objective",
}
_ARGUMENTS = {
    other: name for name, others in _OTHER_NAMES.items() for other in others.split()
}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
P = ParamSpec("P")
R = TypeVar("R")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def explaining_keywords(method: Callable[P, R]) -> Callable[P, R]:
    """A method of the engine that says where keyword arguments of the module go."""
    own = [*inspect.signature(method).parameters][1:]  # all except self
    allowed = frozenset(own)

    @wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not allowed.issuperset(kwargs):
            foreign = [name for name in kwargs if name not in allowed]
            keywords = " and ".join(f"{name}=" for name in foreign)
            entries = ", ".join(f'"{name}": {name}' for name in foreign)
            engine: Any = args[0]
            of_module = inspect.signature(engine.module.forward).parameters
            remedy = ""
            for name in foreign:
                if name not in of_module and name in _ARGUMENTS:
                    remedy += f"use {_ARGUMENTS[name]}= in the place of {name}=; "
            raise TypeError(
                f"{method.__name__} has no argument {keywords}, only {', '.join(own)}; "
                f"{remedy}pass keyword arguments of the module as one dict, "
                f"inputs={{{entries}}}"
            )
        return method(*args, **kwargs)

    return called


def same_arguments(method: MethodT) -> Callable[[Callable[..., Any]], MethodT]:
    """For a method that takes the arguments of ``method``.

    Type checkers, ``help`` and errors name those.
    """

    def decorated(other: Any) -> Any:
        other.__signature__ = inspect.signature(method)
        return explaining_keywords(other)

    return decorated


def read_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The positional and keyword arguments with which each replica calls a function.

    A single mapping has keyword arguments, a single tuple positional ones.
    """
    if len(args) != 1 or kwargs:
        return args, kwargs
    return arguments_from_inputs(args[0])
