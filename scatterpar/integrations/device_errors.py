"""Tensors and modules that a step function names, and that are not on its replica.

A call gets copies of what its owner keeps, on the replica's device. What else the
user's code names stays where it is::

    weights = torch.ones(3, device="cuda:0")

    def loss(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels, weights)

On ``cuda:1`` torch raises an error about two devices. ``explained`` adds the names.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Collection, Iterator
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.references import MAX_ENTRIES, WITHOUT_PARTS, parts_of
from scatterpar.state.whose import is_library

_MADE_HERE = (
    "make tensors on the device of the inputs, as torch.zeros(3, device=x.device)"
)
_ACCELERATOR = re.compile(r"\w+:\d+")  # such as cuda:0
_MAX_NAMES = 3  # in an error
_MAX_DEPTH = 4  # self.losses["rare"].weight
_TRAINED = (
    "a tensor that requires grad is not copied; make it a parameter of the model, "
    "which each replica has"
)


@contextlib.contextmanager
def explained(device: torch.device, remedy: str) -> Iterator[None]:
    """Name what the user's code names on other devices, if the body fails.

    Raises:
        RuntimeError: the body's, with names and ``remedy``.
    """
    try:
        yield
    except RuntimeError as error:
        found = _named_elsewhere(error, device)
        if "device" not in str(error):
            raise
        # A kernel that failed on one device is no question of places.
        if not found and len({*_ACCELERATOR.findall(str(error))}) < 2:
            raise
        if not found:
            raise RuntimeError(
                f"a replica computes on {device}, but your code computes with a tensor "
                f"of another device, which has no name: {_MADE_HERE}"
            ) from error
        names = [repr(name) for name in found]
        if len(names) > _MAX_NAMES:
            names[_MAX_NAMES - 1 :] = [f"{len(names) - _MAX_NAMES + 1} more"]
        are_trained = [_is_trained(value) for value in found.values()]
        raise RuntimeError(
            f"a replica computes on {device}, but {' and '.join(names)}, which your "
            "code names, is on another device: "
            f"{_TRAINED if any(are_trained) else remedy}"
        ) from error


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _named_elsewhere(
    error: BaseException, device: torch.device
) -> dict[str, Tensor | nn.Module]:
    """The tensors and modules on another device that the user's functions name in which
    ``error`` was raised, by their names.
    """
    found: dict[str, Tensor | nn.Module] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A library's variables are no names that the user knows.
        if is_library(frame.f_globals.get("__name__")):
            continue
        names = frame.f_code.co_names  # of globals and attributes
        for name, value in _variables(frame).items():
            for path, part in _parts(name, value, names, 0):
                if _is_elsewhere(part, device):
                    found[path] = part
    return found


def _variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a function, by name; ``self`` by the name of its class."""
    file_globals = frame.f_globals
    variables = {
        name: file_globals[name]
        for name in frame.f_code.co_names
        if name in file_globals
    }
    for name, value in frame.f_locals.items():
        variables[type(value).__name__ if name == "self" else name] = value
    return variables


def _parts(
    name: str, value: Any, names: Collection[str], depth: int
) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """The tensors and modules in ``value``, with their paths.

    Of attributes, those that are in ``names``, also as properties.
    """
    if isinstance(value, (Tensor, nn.Module)):
        yield name, value
    if isinstance(value, (Tensor, *WITHOUT_PARTS)) or depth == _MAX_DEPTH:
        return
    # Longer containers are data.
    if isinstance(value, (list, tuple)) and len(value) <= MAX_ENTRIES:
        for number, entry in enumerate(value):
            yield from _parts(f"{name}[{number}]", entry, names, depth + 1)
    if isinstance(value, dict) and len(value) <= MAX_ENTRIES:
        for key, entry in value.items():
            yield from _parts(f"{name}[{key!r}]", entry, names, depth + 1)
    for attribute, entry in parts_of(value).attributes.items():
        if attribute in names or attribute.lstrip("_") in names:
            yield from _parts(f"{name}.{attribute}", entry, names, depth + 1)


def _is_elsewhere(part: Tensor | nn.Module, device: torch.device) -> bool:
    """Whether a tensor, or one of a module's, is on another accelerator.

    On the host it would fail on one device, too.
    """
    tensors: Any = [part]
    if isinstance(part, nn.Module):
        tensors = chain(part.parameters(), part.buffers())
    return any(t.device.type != "cpu" and t.device != device for t in tensors)
