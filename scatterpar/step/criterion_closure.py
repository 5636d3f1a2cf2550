"""The objects that a criterion refers to beside its arguments: bound, closed over, or
global.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import is_unexpanded
from scatterpar.errors import add_note
from scatterpar.replicas.module_copy import contents, module_of

DEPTH = 4  # a function, another one in its file, an object there, a list in the object
MAX_ENTRIES = 1000  # of a container; longer ones are data
_MAX_VALUES = 10_000  # that are searched; they take 10 ms
_LOG_ENTRIES = 32
_CONTAINERS = {dict, list, tuple}
_PLAIN_TYPES = {bool, int, float, complex, str, bytes, types.NoneType}
PLAIN = (int, float, complex, str, bytes, types.NoneType, type, types.ModuleType)


def closure_and_globals(
    function: types.FunctionType,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name: a function's closure variables and defaults, and the globals that it
    names.
    """
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    positional = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(positional) :]
    closure = {
        **{
            name: value for name, cell in cells if (value := contents(cell)) is not cell
        },
        **dict(zip(names, positional, strict=True)),
        **(function.__kwdefaults__ or {}),
    }
    file_globals = {
        n: function.__globals__[n] for n in _names(code) if n in function.__globals__
    }
    return closure, file_globals


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a code object names, and those in functions and comprehensions
    inside it.
    """
    reads = [each for each in dis.get_instructions(code) if "GLOBAL" in each.opname]
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return (*(each.argval for each in reads), *chain(*inner))


Held = Tensor | nn.Module | torch.Generator


def closure_contents(function: Any) -> list[Held]:
    """The tensors, modules and generators that a criterion refers to, except its own
    module; the nearest first.

    Each step searches, so numbers and words are passed over, and logs for the most
    part.
    """
    held: list[Held] = []
    seen = {id(module_of(function))}
    level = [function]
    values_left = _MAX_VALUES
    for _ in range(DEPTH + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, PLAIN) or id(value) in seen or not values_left:
                continue
            seen.add(id(value))
            values_left -= 1
            if isinstance(value, Held):
                held.append(value)
                continue
            try:
                children = list(_children(value))
            except Exception:  # raised by a user's object
                continue
            next_level += _children_to_search(children)
        level = next_level
    return held


def _children_to_search(children: list[Any]) -> list[Any]:
    """These values; of a long list of nothing but numbers, words and containers, which
    is a log, the first and the last ones.
    """
    kinds = set(map(type, children))
    if kinds <= _PLAIN_TYPES:
        return []
    if len(children) > 2 * _LOG_ENTRIES and kinds <= _PLAIN_TYPES | _CONTAINERS:
        return children[:_LOG_ENTRIES] + children[-_LOG_ENTRIES:]
    return children


def trained_leaves(held: Sequence[Held]) -> list[Tensor]:
    """The leaves among these tensors, and in these modules, that require grad."""
    each = (
        value.parameters() if isinstance(value, nn.Module) else [value]
        for value in held
    )
    tensors = [value for value in chain(*each) if isinstance(value, Tensor)]
    return list({id(t): t for t in tensors if t.requires_grad and t.is_leaf}.values())


def training_buffers(held: Sequence[Held]) -> list[Tensor]:
    """The buffers that a call of these modules may write: those of parts in training
    mode.
    """
    parts = chain(*(value.modules() for value in held if isinstance(value, nn.Module)))
    buffers = chain(*(part.buffers(recurse=False) for part in parts if part.training))
    dense = (b for b in buffers if b.layout == torch.strided and is_unexpanded(b))
    writable = [buffer for buffer in dense if not buffer.is_inference()]
    return list({id(buffer): buffer for buffer in writable}.values())


def reachable(root: Any, depth: int, seen: set[int]) -> list[Any]:
    """``root`` and what it leads to, each before its children, as far as user objects
    allow it.
    """
    found, rest = [], [(root, depth)]
    with contextlib.suppress(Exception):  # raised by a user's object
        while rest:
            value, left = rest.pop()
            is_plain = isinstance(value, PLAIN)
            if is_plain or id(value) not in seen:
                found.append(value)
                seen.add(id(value))
                if left and not is_plain and not isinstance(value, (Tensor, nn.Module)):
                    rest += [
                        (child, left - 1) for child in reversed([*_children(value)])
                    ]
    return found


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return items if len(value) <= MAX_ENTRIES else ()
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return value.__self__, value.__func__
    of_torch = (getattr(value, "__module__", None) or "").startswith("torch.")
    return () if of_torch else named_values(value).values()


def named_values(function: Any) -> dict[str, Any]:
    """The objects that a function refers to, by name: bound, closed over, global,
    attributes.
    """
    if isinstance(function, functools.partial):
        bound = {f"argument {k}": value for k, value in enumerate(function.args)}
        return {**named_values(function.func), **bound, **function.keywords}
    if isinstance(function, types.MethodType):
        return {**named_values(function.__func__), **named_values(function.__self__)}
    if isinstance(function, types.FunctionType):
        closure, file_globals = closure_and_globals(function)
        return {**file_globals, **closure}
    # A module's attributes are replicated.
    return (
        {}
        if isinstance(function, nn.Module)
        else dict(getattr(function, "__dict__", {}))
    )


def note_wrong_devices(
    error: BaseException, function: Any, device: torch.device
) -> None:
    """Add a note to ``error`` per tensor of ``function``'s closure that is not on
    ``device``.
    """
    for name, value in named_values(function).items():
        tensor = (
            next(value.parameters(), None) if isinstance(value, nn.Module) else value
        )
        if isinstance(tensor, Tensor) and tensor.device != device:
            add_note(
                error,
                f"the criterion uses {name!r} on {tensor.device}, but this replica "
                "computes on "
                f"{device}; bind it with functools.partial(criterion, {name}={name}), "
                "or make the "
                f"criterion an nn.Module that has it as a buffer",
            )


def not_replicated(leaf: Tensor, criterion: Any) -> ValueError:
    """The error for a gradient of a leaf that no replica has; names it as the criterion
    does.
    """
    name = f"a parameter of shape {tuple(leaf.shape)}"
    for holder, value in named_values(criterion).items():
        named = (
            value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        )
        for inner, tensor in named:
            if tensor is leaf:
                name = f"{holder}.{inner}" if inner else holder
    return ValueError(
        f"a gradient arrives at {name}, which is no replica's: bind its network with "
        "functools.partial(criterion, net=net), or make it a part of an nn.Module, "
        "and replicas "
        "train it; if it is not to be trained, call net.requires_grad_(False). "
        "Nothing was changed"
    )
