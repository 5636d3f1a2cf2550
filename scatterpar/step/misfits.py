"""Errors in words for calls of the user's functions that their arguments do not fit.

They are made after a call has failed. So a call that fits costs nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def misfit_of_inputs(
    module: Callable[..., Any],
    inputs: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> TypeError | None:
    """The error for ``inputs`` that ``module`` does not take; ``None`` if it does."""
    signature = _misfit(module, args, kwargs)
    if signature is None:
        return None
    name = f"{type(module).__name__}.forward{signature}"
    if kwargs:
        passed = f"the mapping's keys {', '.join(map(str, kwargs))}"
        remedy = "for a mapping as one argument, pass a tuple of it: (inputs,)"
    elif isinstance(inputs, tuple):
        passed = f"{len(args)} positional arguments"
        remedy = "pass a tuple with one entry per argument, or a mapping by name"
    else:
        passed = f"a {type(inputs).__name__} as one argument"
        remedy = "for several arguments, pass a tuple of them, such as (a, b)"
        if dataclasses.is_dataclass(inputs):  # its fields may be these arguments
            remedy = "pass its fields by name, such as vars(batch)"
    return TypeError(f"inputs: {name} does not take {passed}; {remedy}")


def misfit_of_criterion(criterion: Callable[..., Any]) -> TypeError | None:
    """The error for a ``criterion`` that does not take an output and targets."""
    signature = _misfit(criterion, (None, None), {})
    if signature is None:
        return None
    name = getattr(criterion, "__qualname__", type(criterion).__name__)
    return TypeError(
        "the criterion is called as criterion(output, targets), which "
        f"{name}{signature} does not take; pass a function of both, such as lambda "
        "output, targets: …, which may leave one of them unused"
    )


def _misfit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.Signature | None:
    """The signature of ``function`` if it does not take these arguments."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a function without one
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return signature
    return None
