"""What a function brings along beside its arguments: bound, closed over, or named in its file."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.threads.workers import note

__all__ = [
    "captured_tensors",
    "ignored_values",
    "note_strangers",
    "set_by_forward",
    "surroundings",
]


def surroundings(function: types.FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a function closes over, or has as default; and what it may name of its file. By name."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    positional = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(positional) :]
    own = {
        **{name: cell.cell_contents for name, cell in cells if _is_filled(cell)},
        **dict(zip(names, positional, strict=True)),
        **(function.__kwdefaults__ or {}),
    }
    of_file = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    return own, of_file


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that is not bound yet
        return False


def captured_tensors(function: Any) -> list[Tensor]:
    """The tensors that a function brings along, where they can be seen."""
    return [value for value in _captured(function).values() if isinstance(value, Tensor)]


def _captured(function: Any) -> dict[str, Any]:
    if isinstance(function, functools.partial):
        bound = {f"argument {k}": value for k, value in enumerate(function.args)}
        return {**_captured(function.func), **bound, **function.keywords}
    if isinstance(function, types.MethodType):
        return {**_captured(function.__func__), **_attributes(function.__self__)}
    if isinstance(function, types.FunctionType):
        own, of_file = surroundings(function)
        return {**of_file, **own}
    return _attributes(function)


def _attributes(value: Any) -> dict[str, Any]:
    """Those of an object that is no module: a module's are replicated."""
    return {} if isinstance(value, nn.Module) else dict(getattr(value, "__dict__", {}))


def set_by_forward(function: Any, module: nn.Module) -> str | None:
    """An attribute that a forward pass of ``module`` has set, and ``function`` reads elsewhere.

    A replica's attributes stay the replica's: of the module that a criterion closes over, it
    reads what was there before.

    Args:
        function: the criterion.
        module: a replica whose forward pass has run.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    brought = [v for v in _captured(function).values() if isinstance(v, nn.Module)]
    if code is None or not brought:
        return None
    has_it = {type(part) for value in brought for part in value.modules()}
    for part in module.modules():
        for name, value in vars(part).items():
            is_read = name in code.co_names and type(part) in has_it
            if is_read and isinstance(value, Tensor) and value.grad_fn is not None:
                return name
    return None


def note_strangers(error: BaseException, function: Any, device: torch.device) -> None:
    """Say so on ``error`` where ``function`` brought tensors along that are not on ``device``."""
    for name, value in _captured(function).items():
        tensor = next(value.parameters(), None) if isinstance(value, nn.Module) else value
        if isinstance(tensor, Tensor) and tensor.device != device:
            note(
                error,
                f"the criterion brings {name!r} along, which is on {tensor.device}, but this "
                f"replica computes on {device}: what a function closes over cannot be moved; bind "
                f"it with functools.partial(criterion, {name}={name}), or make the criterion an "
                f"nn.Module that has it as a buffer",
            )


def ignored_values(function: Any) -> set[int]:
    """The labels that ``function`` may leave out.

    These are -100, 255 (as in pictures), and what it, or a loss that it is made of, says of
    ``ignore_index``.
    """
    found = {-100, 255}
    while isinstance(function, functools.partial):
        found.add(function.keywords.get("ignore_index", -100))
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    found.add(getattr(owner, "ignore_index", -100))
    losses = owner.children() if isinstance(owner, nn.Module) else _captured(function).values()
    found.update(vars(v).get("ignore_index", -100) for v in losses if isinstance(v, nn.Module))
    code = getattr(function, "__code__", None)
    if code is not None:
        names = [code.co_names, *(c for c in code.co_consts if isinstance(c, tuple))]
        if any("ignore_index" in each for each in names):
            found.update(c for c in code.co_consts if type(c) is int)
    return {value for value in found if type(value) is int}
