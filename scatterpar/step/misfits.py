"""Errors and notes for user functions that are called with other arguments.

They are made after a call has failed. So a call that fits costs nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.errors import Refusal, add_note
from scatterpar.objects.references import read_attribute
from scatterpar.objects.walk import Walk
from scatterpar.step.request import Request

NO_TARGETS = (
    "no targets were passed, and the criterion gets None; pass them as "
    "forward_backward(inputs, targets, criterion)"
)


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
        remedy = (
            "pass a tuple with one entry per argument, such as (inputs,) for a tuple "
            "as one argument, or a mapping by name"
        )
    else:
        passed = f"a {type(inputs).__name__} as one argument"
        remedy = "for several arguments, pass a tuple of them, such as (a, b)"
        if dataclasses.is_dataclass(inputs):  # its fields may be these arguments
            remedy = "pass its fields by name, such as vars(batch)"
    return TypeError(f"inputs: {name} does not take {passed}; {remedy}")


def misfit_of_dataclass(
    error: Exception,
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> TypeError | None:
    """The error for a dataclass that ``module`` uses as a tensor; ``None`` if it does
    not.
    """
    text = str(error)
    for value in (*args, *kwargs.values()):
        kind = type(value).__name__
        if isinstance(value, type) or not dataclasses.is_dataclass(value):
            continue
        words = f"not {kind}", f"got ({kind}", f"'{kind}' object has no attribute"
        if any(phrase in text for phrase in words):
            fields = ", ".join(
                f"batch.{field.name}" for field in dataclasses.fields(value)
            )
            return TypeError(
                f"inputs: forward of {type(module).__name__} uses its first argument "
                f"as a tensor, and gets a whole {kind}, a dataclass; pass its tensors "
                f"as a tuple ({fields}), in the order of forward's arguments, or by "
                "name, as vars(batch)"
            )
    return None


def misfit_of_criterion(
    criterion: Callable[..., Any], output: Any = None, targets: Any = None
) -> TypeError | None:
    """The error for a ``criterion`` that does not take ``output`` and ``targets``."""
    signature = _misfit(criterion, (None, None), {})
    if signature is None:
        return None
    name = read_attribute(criterion, "__qualname__", type(criterion).__name__)
    return TypeError(
        "the criterion is called as criterion(output, targets), which "
        f"{name}{signature} does not take; pass "
        f"{_as_function_of_both(criterion, output, targets)}"
    )


def _as_function_of_both(
    criterion: Callable[..., Any], output: Any, targets: Any
) -> str:
    """The function of output and targets that calls the criterion."""
    of_output, of_targets = _spread(output), _spread(targets)
    forms = [
        ("output, *targets", (None, *of_targets)),
        ("*output, targets", (*of_output, None)),
        ("*output, *targets", (*of_output, *of_targets)),
        ("output", (None,)),
    ]
    fitting = [form for form, args in forms if _misfit(criterion, args, {}) is None]
    form = fitting[0] if fitting else "…"
    return f"lambda output, targets: criterion({form})"


def _spread(value: Any) -> Sequence[None]:
    """As many arguments as ``value`` has entries, if it is a tuple or list."""
    return [None] * len(value) if isinstance(value, (tuple, list)) else [None]


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


def add_advice(error: BaseException, request: Request) -> None:
    """Add a note if the error is one that a batch gives which was passed otherwise."""
    if isinstance(error, (Refusal, torch.OutOfMemoryError)):
        return  # their texts have numbers of rows and bytes
    if not request.batches:  # calls for whole batches are a loop's
        return
    if isinstance(error, (TypeError, AttributeError)):
        _explain_pair(error, request)
    elif isinstance(error, (RuntimeError, ValueError, IndexError)):
        _explain_whole_batch(error, request)


def _explain_pair(error: BaseException, request: Request) -> None:
    """Explain inputs and targets of a loader that were passed as one list or tuple."""
    batch = request.batches[0]
    inputs = batch.inputs
    if batch.targets is not None or not isinstance(inputs, (list, tuple)):
        return
    if len(inputs) < 2 or not all(isinstance(entry, Tensor) for entry in inputs):
        return
    reading = "one argument, a list"
    if isinstance(inputs, tuple):
        reading = f"{len(inputs)} positional arguments"
    add_note(
        error,
        f"the module gets these inputs as {reading}, and there are no targets; a batch "
        "of inputs and targets is passed as forward_backward(inputs, targets, "
        "criterion)",
    )


def _explain_whole_batch(error: BaseException, request: Request) -> None:
    """Explain a tensor of the whole batch, to which the criterion refers itself."""
    if not re.search(rf"\b{request.rows}\b", str(error)):
        return
    walk = Walk([request.criterion, request.count])
    names: dict[int, str] = {}  # by tensor; the first of several
    for place in walk.places:
        if (
            _is_as_long_as_batch(place.value, request)
            and id(place.value) not in walk.weights
        ):
            names.setdefault(id(place.value), walk.name_of_place(place))
    if names:
        add_note(
            error,
            f"the criterion refers to {', '.join(names.values())} with "
            f"{request.rows} entries, as many as the whole batch has rows, but is "
            "called for a micro-batch; pass it in the targets, such as "
            "targets=(labels, weights), and the criterion gets the entries of its rows",
        )


def _is_as_long_as_batch(value: Any, request: Request) -> bool:
    if not isinstance(value, Tensor) or value.ndim <= request.dim:
        return False
    return value.shape[request.dim] == request.rows
