"""Modules that torch's protocol for replicas does not know whole: TorchScript, fx, slots."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

__all__ = [
    "buffers_of",
    "is_script",
    "new_like",
    "rebind_script",
    "script_state",
    "script_tensors",
    "slots_of",
    "zero_grad_has_no_effect",
]


def is_script(value: Any) -> bool:
    """Whether ``value`` is a TorchScript module: its tensors live in C++, with all its children."""
    return isinstance(value, torch.jit.ScriptModule)


def script_tensors(script: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a TorchScript module and its children, by their paths."""
    parameters = script.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(script.named_buffers(remove_duplicate=False))


def script_state(script: nn.Module) -> list[Any]:
    """What a copy of a TorchScript module cannot follow, beside its tensors' values."""
    return [
        *map(id, script_tensors(script).values()),
        *[module.training for _, module in script.named_modules()],
    ]


def rebind_script(script: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a TorchScript module these tensors, where it has others under their paths."""
    now = script_tensors(script)
    modules: dict[str, nn.Module] = {}
    for path, tensor in tensors.items():
        if now.get(path) is not tensor:
            modules = modules or dict(script.named_modules(remove_duplicate=False))
            owner, _, name = path.rpartition(".")
            setattr(modules[owner], name, tensor)


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """The buffers of a module to read and rebind; of a TorchScript module, its children's too."""
    return _ScriptBuffers(module) if is_script(module) else module._buffers


def new_like(module: nn.Module) -> nn.Module:
    """A copy that shares everything, for a mirror to take apart.

    fx gives every GraphModule a class of its own, and copies only what the graph mentions:
    here the copy has the same class, with its code, and all attributes.
    """
    if is_script(module):
        with torch.no_grad():
            return copy.deepcopy(module)
    if isinstance(module, GraphModule):
        replica: nn.Module = object.__new__(type(module))
        vars(replica).update(vars(module))
        vars(replica)["_is_replica"] = True
    else:
        replica = module._replicate_for_data_parallel()
    vars(replica)["zero_grad"] = zero_grad_has_no_effect
    return replica


def zero_grad_has_no_effect(set_to_none: bool = True) -> None:
    """What ``self.zero_grad()`` is inside a forward pass.

    Each replica's gradients are those of the sub-steps before: they are not the user's to
    clear, and ``nn.DataParallel`` does not let it happen either.
    """
    warnings.warn(
        "zero_grad() inside forward has no effect: a replica's gradients are those of earlier "
        "sub-steps of the same step; call zero_grad() before forward_backward",
        stacklevel=2,
    )


@functools.cache
def slots_of(kind: Any) -> tuple[types.MemberDescriptorType, ...]:
    """What the classes of a module keep in ``__slots__`` instead of its ``__dict__``."""
    return tuple(
        member
        for base in kind.__mro__
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    )


class _ScriptBuffers(MutableMapping[str, "Tensor | None"]):
    """The buffers of a TorchScript module and its children, as they are now."""

    def __init__(self, script: nn.Module) -> None:
        self._script = script

    def _now(self) -> dict[str, Tensor]:
        return dict(self._script.named_buffers())

    def __getitem__(self, path: str) -> Tensor:
        return self._now()[path]

    def __setitem__(self, path: str, value: Tensor | None) -> None:
        if value is not None:
            rebind_script(self._script, {path: value})

    def __delitem__(self, path: str) -> None:
        raise TypeError(f"TorchScript modules keep their buffers, and {path!r} is one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())
