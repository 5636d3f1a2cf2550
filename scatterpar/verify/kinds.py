"""What makes a criterion or a batch another kind than those that were met before.

Kinds are numbers: nothing of the user's is kept, and nothing is told by an address, which a new
function may have from an old one. A lambda that is made anew in every step is of one kind; the
same lambda over other things (class weights where there were none) is of another.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.readout import Readout
from scatterpar.step import nested
from scatterpar.step.captured import surroundings

__all__ = [
    "has_batch_statistics",
    "holes",
    "is_integer",
    "is_plain",
    "kind_of_batch",
    "kind_of_function",
    "left_out",
]

_DEPTH = 4  # how far a function's own things are followed
_DEPTH_OF_OBJECTS = 2  # and those of objects, of which every step asks
_MOST = 32  # how many entries of a container
_LARGEST = 2**22  # floating-point tensors of more elements are not searched for zeros


def kind_of_function(function: Any) -> int:
    """What ``function`` is made of: code, flags, names and the types of all else."""
    return hash(_described(function, _DEPTH))


def kind_of_batch(*parts: Any) -> int:
    """The structure of the parts, and dtype and dimensions of their tensors; not their sizes."""
    return hash(tuple(_outline(leaf) for part in parts for leaf in [part, *nested.leaves(part)]))


def _outline(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and is_plain(leaf):
        return (leaf.dtype, leaf.ndim)
    return leaf if leaf is None or isinstance(leaf, bool) else _name(type(leaf))


def _described(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str, torch.dtype)):
        return value
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.ndim)
    if isinstance(value, type):
        return _name(value)
    if not depth:
        return _name(type(value))
    inside = functools.partial(_each, depth=depth - 1)
    if isinstance(value, types.FunctionType):
        return (hash(value.__code__), *inside(_flags_and_more(value)))
    if isinstance(value, types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return inside([value.func, *value.args, sorted(value.keywords.items())])
    if isinstance(value, types.MethodType):
        return inside([value.__func__, value.__self__])
    if isinstance(value, tuple):
        return inside(value)
    if isinstance(value, (dict, list, set)):  # such as a history, which gets longer in every step
        items = value.values() if isinstance(value, dict) else value
        telling = [i for i in islice(items, _MOST) if not isinstance(i, (int, float, str))]
        return (_name(type(value)), frozenset(inside(telling)[1:]))
    own = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
    if isinstance(value, nn.Module):
        own |= {**value._buffers, **value._modules}
    return (_name(type(value)), *_each(_named(own), min(depth - 1, _DEPTH_OF_OBJECTS)))


def _flags_and_more(function: types.FunctionType) -> list[Any]:
    """What a function finds around it; of the names of its file, those that are no functions."""
    closed_over, of_module = surroundings(function)
    plain = {k: v for k, v in of_module.items() if isinstance(v, (bool, str, Tensor, type(None)))}
    return [*_named(closed_over), *_named(plain)]


def _named(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(values.items(), key=lambda item: item[0])


def _each(values: Sequence[Any], depth: int) -> tuple[Any, ...]:
    return (len(values), *(_described(value, depth) for value in values[:_MOST]))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_plain(tensor: Tensor) -> bool:
    """Whether it is torch's own dense tensor, that runs no code of the user's."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def holes(
    tensors: Iterable[Tensor], ignored: set[int], readout: Readout
) -> Callable[[], frozenset[Hashable]]:
    """What the tensors hold: labels that may be left out, and zeros, NaN and less, as masks do.

    Batches of one shape differ in that: the first one may have no padding. What is returned
    waits for it, once for everything that ``readout`` was asked for.
    """
    names: list[Hashable] = []
    found: list[Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if is_integer(tensor):
            names.append(("left out", tensor.dtype, tensor.ndim))
            found.append(left_out(tensor, ignored).any())
        if is_integer(tensor) or tensor.numel() <= _LARGEST:
            names.append(("zero", tensor.dtype, tensor.ndim))
            found.append((tensor == 0).any())
        if tensor.is_floating_point() and tensor.numel() <= _LARGEST:
            least = tensor.amin()
            names += [("negative", tensor.dtype, tensor.ndim), ("NaN", tensor.dtype, tensor.ndim)]
            found += [least < 0, least.isnan()]
    flags = readout.ask(found)
    return lambda: frozenset(name for name, flag in zip(names, flags(), strict=True) if flag)


def left_out(tensor: Tensor, ignored: set[int]) -> Tensor:
    """Where an integer tensor holds labels that may be left out: negative ones, and ``ignored``."""
    where = tensor < 0
    for value in ignored:
        if value >= 0:
            where = where | (tensor == value)
    return where


def is_integer(tensor: Tensor) -> bool:
    """Whether it may hold labels."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def has_batch_statistics(module: Any) -> bool:
    """Whether batch normalisation, in its present mode, ties rows to each other."""
    return any(
        isinstance(child, nn.modules.batchnorm._BatchNorm)
        and (child.training or child.running_mean is None)
        for child in module.modules()
    )
