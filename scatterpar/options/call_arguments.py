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

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from scatterpar.errors import warn
from scatterpar.replicas.references import module_of
from scatterpar.step.task import as_call

# What loops and libraries call the arguments of a step.
_OTHER_NAMES = {
    "inputs": "input x data batch samples images",
    "targets": "target label labels y gt",
    "criterion": "loss loss_fn loss_func loss_function criteria objective",
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
            of_module = [parameter.name for parameter in parameters_of(engine.module)]
            remedy = ""
            for name in foreign:
                if name not in of_module and _near(name, own):
                    remedy += f"use {_near(name, own)}= in the place of {name}=; "
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


def _near(name: str, names: Sequence[str]) -> str:
    """The argument that is meant by a name that loops have for it; "" if unknown."""
    for argument, others in _OTHER_NAMES.items():
        if name in others.split():
            return argument
    return next(iter(difflib.get_close_matches(name, names, 1)), "")


def read_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The positional and keyword arguments with which each replica calls ``function``.

    A single mapping has keyword arguments, a single tuple positional ones. Where the
    function takes the mapping or the tuple itself, and not its entries, it gets it as
    before version 0.4, with a ``DeprecationWarning``.
    """
    if len(args) != 1 or kwargs:
        return args, kwargs
    (value,) = args
    entries, named = as_call(value)
    # A tensor or a list: there is one reading.
    is_one_argument = len(entries) == 1 and entries[0] is value
    if is_one_argument:
        return args, kwargs
    parameters = parameters_of(function)
    if len(parameters) == 1 and not _is_parameter(parameters[0], entries, named):
        kind = "dict" if isinstance(value, Mapping) else "tuple"
        parts = "keyword" if isinstance(value, Mapping) else "positional"
        warn(
            f"a single {kind} is passed as one argument here, since the function takes "
            f"none of its entries; from version 0.5 on its entries are {parts} "
            "arguments, as in forward_backward. Pass (value,) to pass one argument.",
            DeprecationWarning,
        )
        return args, kwargs
    return entries, named


def _is_parameter(
    parameter: inspect.Parameter, entries: tuple[Any, ...], named: Mapping[str, Any]
) -> bool:
    """Whether the entries of a container fit a function's only parameter."""
    takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return takes_any or len(entries) == 1 or parameter.name in named


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that rows are passed to; none for a function in C."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return []
    inner = called
    # ``signature`` has taken the bound ones away already.
    while isinstance(inner, partial):
        inner = inner.func
    # Any other function than a module's own gets the replica first.
    return parameters if module_of(inner) is not None else parameters[1:]
