"""The objects that a criterion refers to beside its arguments.

They are bound, closed over, or global.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import is_unexpanded
from scatterpar.errors import add_note
from scatterpar.replicas.references import contents, module_of

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
    """By name: closure variables and defaults, and the globals that a function names."""
    code = function.__code__
    closure: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = contents(cell)
        if value is not cell:  # else the variable is not bound
            closure[name] = value
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    names_with_default = positional[len(positional) - len(defaults) :]
    closure |= zip(names_with_default, defaults, strict=True)
    closure |= function.__kwdefaults__ or {}
    file_globals: dict[str, Any] = {}
    for name in _globals_named_in(code):
        if name in function.__globals__:
            file_globals[name] = function.__globals__[name]
    return closure, file_globals


@functools.lru_cache(maxsize=1024)
def _globals_named_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a code object and the code objects inside it name.

    Those inside it are of functions and comprehensions.
    """
    names: list[str] = []
    for instruction in dis.get_instructions(code):
        if "GLOBAL" in instruction.opname:
            names.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _globals_named_in(constant)
    return tuple(names)


Referent = Tensor | nn.Module | torch.Generator


def closure_contents(function: Any) -> list[Referent]:
    """The tensors, modules and generators that a criterion refers to; nearest first.

    Its own module is left out.
    Each step searches, so numbers and words are passed over, and logs for the most
    part.
    """
    referents: list[Referent] = []
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
            if isinstance(value, Referent):
                referents.append(value)
                continue
            try:
                children = list(_children(value))
            except Exception:  # raised by a user's object
                continue
            next_level += _children_to_search(children)
        level = next_level
    return referents


def _children_to_search(children: list[Any]) -> list[Any]:
    """These values, without those that lead to no tensor.

    A long list of nothing but numbers, words and containers is a log: of that the first
    and the last values.
    """
    kinds = set(map(type, children))
    if kinds <= _PLAIN_TYPES:
        return []
    if len(children) > 2 * _LOG_ENTRIES and kinds <= _PLAIN_TYPES | _CONTAINERS:
        return children[:_LOG_ENTRIES] + children[-_LOG_ENTRIES:]
    return children


def trained_leaves(referents: Sequence[Referent]) -> list[Tensor]:
    """The leaves among these tensors, and in these modules, that require grad."""
    leaves: dict[int, Tensor] = {}
    for value in referents:
        tensors: Iterable[Any] = [value]
        if isinstance(value, nn.Module):
            tensors = value.parameters()
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf:
                leaves[id(tensor)] = tensor
    return list(leaves.values())


def training_buffers(referents: Sequence[Referent]) -> list[Tensor]:
    """The buffers that a call of these modules may write.

    Those are the buffers of parts in training mode.
    """
    buffers: dict[int, Tensor] = {}
    for value in referents:
        if not isinstance(value, nn.Module):
            continue
        for part in value.modules():
            if part.training:
                for buffer in part.buffers(recurse=False):
                    if _is_writable(buffer):
                        buffers[id(buffer)] = buffer
    return list(buffers.values())


def _is_writable(buffer: Tensor) -> bool:
    is_dense = buffer.layout == torch.strided and is_unexpanded(buffer)
    return is_dense and not buffer.is_inference()


def reachable(root: Any, depth: int, seen: set[int]) -> list[Any]:
    """``root`` and what it leads to, each value before its children.

    The search ends early if a user's object raises.
    """
    values: list[Any] = []
    waiting: list[tuple[Any, int]] = [(root, depth)]  # with the levels below it
    with contextlib.suppress(Exception):
        while waiting:
            value, levels = waiting.pop()
            is_plain = isinstance(value, PLAIN)
            if not is_plain and id(value) in seen:
                continue
            values.append(value)
            seen.add(id(value))
            is_leaf = is_plain or isinstance(value, (Tensor, nn.Module))
            if levels and not is_leaf:
                for child in reversed([*_children(value)]):
                    waiting.append((child, levels - 1))
    return values


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, dict)):
        if len(value) > MAX_ENTRIES:
            return ()
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return value.__self__, value.__func__
    module = getattr(value, "__module__", None) or ""
    if module.startswith("torch."):
        return ()
    return named_values(value).values()


def named_values(function: Any) -> dict[str, Any]:
    """The objects that a function refers to, by name.

    They are bound, closed over, global, or its attributes.
    """
    if isinstance(function, functools.partial):
        bound = {f"argument {k}": value for k, value in enumerate(function.args)}
        return {**named_values(function.func), **bound, **function.keywords}
    if isinstance(function, types.MethodType):
        return {**named_values(function.__func__), **named_values(function.__self__)}
    if isinstance(function, types.FunctionType):
        closure, file_globals = closure_and_globals(function)
        return {**file_globals, **closure}
    if isinstance(function, nn.Module):  # its attributes are replicated
        return {}
    return dict(getattr(function, "__dict__", {}))


def note_wrong_devices(
    error: BaseException, function: Any, device: torch.device
) -> None:
    """Add a note to ``error`` per tensor that ``function`` uses on another device."""
    for name, value in named_values(function).items():
        tensor = value
        if isinstance(value, nn.Module):
            tensor = next(value.parameters(), None)
        if isinstance(tensor, Tensor) and tensor.device != device:
            add_note(
                error,
                f"the criterion uses {name!r} on {tensor.device}, but this replica "
                f"computes on {device}; bind it with functools.partial(criterion, "
                f"{name}={name}), or make the criterion an nn.Module that has it as a "
                f"buffer",
            )


def not_replicated(leaf: Tensor, criterion: Any) -> ValueError:
    """The error for a gradient of a leaf that no replica has."""
    return ValueError(
        f"a gradient arrives at {_name_of(leaf, criterion)}, which is no replica's: "
        f"bind its network with functools.partial(criterion, net=net), or make it a "
        f"part of an nn.Module, and replicas train it; if it is not to be trained, call "
        f"net.requires_grad_(False). Nothing was changed"
    )


def _name_of(leaf: Tensor, criterion: Any) -> str:
    """The name of a leaf as the criterion names it, or its shape."""
    name = f"a parameter of shape {tuple(leaf.shape)}"
    for holder, value in named_values(criterion).items():
        if value is leaf:
            name = holder
        if isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                if parameter is leaf:
                    name = f"{holder}.{inner}"
    return name
